"""The Lua scripts that the Redis backend runs on the server: each is atomic to all other users (names in redis.py).

Only the entries are authoritative. Counts may be lost, or overwritten by any user of the server: every script first removes
values of another type, and ``sound`` checks that the rest is consistent; if not, ``PUT`` asks for a new count.
"""

PREFIX = b"{kvpack}:"
ENTRY = PREFIX + b"entry:"
PINS = PREFIX + b"pins"
KEYS = [PREFIX + b"used", PREFIX + b"sizes", PREFIX + b"bytes", PINS]

# KEYS in all: used, sizes, bytes, pins. Members of the sets are keys of 32 bytes.
NAMES = "local function entry(key) return '{kvpack}:entry:' .. key end"

BEGIN = (
    NAMES
    + """
for number, kind in ipairs({'zset', 'hash', 'string', 'hash'}) do
    local found = redis.call('TYPE', KEYS[number]).ok
    if found ~= kind and found ~= 'none' then redis.call('DEL', KEYS[number]) end
end

local function add(bytes)
    local total = tonumber(redis.call('GET', KEYS[3]) or '')
    if total then redis.call('SET', KEYS[3], string.format('%.0f', total + bytes)) end
end

local function microseconds()
    local clock = redis.call('TIME')
    return clock[1] * 1000000 + clock[2]
end

local function count(key, size, used)
    local before = tonumber(redis.call('HGET', KEYS[2], key) or '') or 0
    redis.call('HSET', KEYS[2], key, size)
    redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', used), key)
    add(size - before)
end

local function forget(key)
    local size = tonumber(redis.call('HGET', KEYS[2], key) or '') or 0
    redis.call('ZREM', KEYS[1], key)
    redis.call('HDEL', KEYS[2], key)
    add(-size)
    return size
end

local function remove(key)
    local size = forget(key)
    return redis.call('DEL', entry(key)), size
end
"""
)

SOUND = """
local function sound()
    local bytes = redis.call('GET', KEYS[3])
    if not bytes or not string.match(bytes, '^%d+$') or #bytes > 15 then return false end
    local entries = redis.call('ZCARD', KEYS[1])
    if entries ~= redis.call('HLEN', KEYS[2]) then return false end
    return tonumber(bytes) >= entries and (entries > 0 or tonumber(bytes) == 0)
end
"""

TOUCH = """
local function touch(chain, seconds, before, now)
    for depth = 1, #chain / 32 do
        local key = string.sub(chain, 32 * depth - 31, 32 * depth)
        redis.call('ZADD', KEYS[1], 'XX', 'GT', string.format('%.0f', now - before - depth), key)
        if seconds ~= '' then redis.call('EXPIRE', entry(key), seconds) end
    end
end
"""

# Sums the sizes; false where one makes no sense.
TOTAL = """
local function total()
    local sum = 0
    for _, size in ipairs(redis.call('HVALS', KEYS[2])) do
        if not string.match(size, '^%d+$') or #size > 15 then return false end
        sum = sum + tonumber(size)
    end
    redis.call('SET', KEYS[3], string.format('%.0f', sum))
    return true
end
"""

# Removes what was used longest ago, except what is kept or pinned, until what is counted fits below ``most``: at most a page of entries.
# ``first`` is how many of the oldest are known to be kept. Returns 1 if it fits, 0 if nothing more can go, 3 at the end of the page,
# then entries evicted, their bytes, and ``first``.
EVICT = """
local PAGE, STEP = 500, 20

local function keys_of(text, kept)
    for at = 1, #text, 32 do kept[string.sub(text, at, at + 31)] = true end
end

local pins
local function is_pinned(key)
    if not pins then
        pins = {}
        for _, pinned in ipairs(redis.call('HVALS', KEYS[4])) do keys_of(pinned, pins) end
    end
    return pins[key]
end

local function evict(most, kept, first)
    local looked, evicted, bytes = 0, 0, 0
    while (tonumber(redis.call('GET', KEYS[3]) or '') or 0) > most do
        if looked >= PAGE then return 3, evicted, bytes, first end
        local oldest = redis.call('ZRANGE', KEYS[1], first, first + STEP - 1)
        if #oldest == 0 then return 0, evicted, bytes, first end
        for _, key in ipairs(oldest) do
            if (tonumber(redis.call('GET', KEYS[3]) or '') or 0) <= most then break end
            looked = looked + 1
            if kept[key] or is_pinned(key) then
                first = first + 1
            else
                local _, freed = remove(key)
                evicted, bytes = evicted + 1, bytes + freed
            end
        end
    end
    return 1, evicted, bytes, first
end
"""

# ARGV: chain, most bytes or '', seconds to live or '', '1' to replace what is there, bytes of a front, '1' to sum sizes anew, then the
# place in the chain, from 1 on, and the bytes of each entry. Returns {-1} where nothing can be said of what is stored, else {entries
# evicted, their bytes, an error of the server or '', {result, ...}}: 1 for an entry that is stored, 0 for one that finds no room, 3
# where more must be evicted first, {front, bytes} of what is there already. After 0 and 3 no other entry is tried.
PUT = (
    BEGIN
    + SOUND
    + TOUCH
    + TOTAL
    + EVICT
    + """
local chain, most, seconds, replaces = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4] == '1'
if not sound() or (ARGV[6] == '1' and not total()) then return {-1} end
local now = microseconds()
local kept, noted, results, evicted, bytes, message, last, state = {}, 0, {}, 0, 0, '', 0, 1

local function put(place, entry_bytes)
    local key = string.sub(chain, 32 * place - 31, 32 * place)
    if redis.call('TYPE', entry(key)).ok == 'string' and not replaces then
        local there = redis.call('STRLEN', entry(key))
        if redis.call('HEXISTS', KEYS[2], key) == 0 then count(key, there, now) end
        return {redis.call('GETRANGE', entry(key), 0, ARGV[5] - 1), there}
    end
    if most and #entry_bytes > most then return 0 end
    -- Counted before it is there: an entry that nobody counts would never go. A server without memory refuses this first write.
    count(key, #entry_bytes, now)
    if most then
        keys_of(string.sub(chain, 32 * noted + 1, 32 * place), kept)
        noted = place
        local fits, more, freed = evict(most, kept, 0)
        evicted, bytes = evicted + more, bytes + freed
        if fits ~= 1 then
            remove(key)
            return fits
        end
    end
    redis.call('DEL', entry(key))
    local done = redis.pcall('SET', entry(key), entry_bytes)
    if type(done) == 'table' and done.err then
        forget(key)
        message = done.err
        return 0
    end
    redis.call('ZADD', KEYS[1], string.format('%.0f', now - place), key)
    last = place
    return 1
end

for number = 7, #ARGV, 2 do
    local result = state == 1 and put(tonumber(ARGV[number]), ARGV[number + 1]) or state
    if result == 0 or result == 3 then state = result end
    table.insert(results, result)
end
touch(string.sub(chain, 1, 32 * last), seconds, 0, now)
return {evicted, bytes, message, results}
"""
)

# ARGV: most bytes, chain to keep, how many of the oldest are known to be kept. Returns as ``evict``.
ROOM = (
    BEGIN
    + EVICT
    + """
local kept = {}
keys_of(ARGV[2], kept)
return {evict(tonumber(ARGV[1]), kept, tonumber(ARGV[3]))}
"""
)

# ARGV: a part of a chain, seconds to live or '', how many keys of the chain are before it.
USE = BEGIN + TOUCH + "touch(ARGV[1], ARGV[2], tonumber(ARGV[3]), microseconds()) return 1"

# ARGV: keys, one after the other. Returns those of the entries that there were.
DELETE = (
    BEGIN
    + """
local removed = {}
for at = #ARGV[1] - 31, 1, -32 do
    local key = string.sub(ARGV[1], at, at + 31)
    if remove(key) == 1 then table.insert(removed, key) end
end
return removed
"""
)

# ARGV: keys, one after the other. Returns for each the bytes of its entry, 0 for what is none, and its last use or ''; changes nothing.
LOOK = (
    NAMES
    + """
local used, found = redis.call('TYPE', KEYS[1]).ok == 'zset', {}
for at = 1, #ARGV[1], 32 do
    local key = string.sub(ARGV[1], at, at + 31)
    local is = redis.call('TYPE', entry(key)).ok == 'string'
    table.insert(found, is and redis.call('STRLEN', entry(key)) or 0)
    table.insert(found, used and redis.call('ZSCORE', KEYS[1], key) or '')
end
return found
"""
)

# Returns {entries, bytes}, or {-1} where the numbers make no sense.
SIZE = BEGIN + SOUND + "if not sound() then return {-1} end return {redis.call('ZCARD', KEYS[1]), tonumber(redis.call('GET', KEYS[3]))}"

# ARGV: keys, one after the other; '' for all that are counted. Counts them as they are now, and forgets those that are gone.
RECOUNT = (
    BEGIN
    + """
local now = microseconds()
local function look(key)
    if #key == 32 and redis.call('TYPE', entry(key)).ok == 'string' then
        count(key, redis.call('STRLEN', entry(key)), now)
    else
        forget(key)
    end
end
for at = 1, #ARGV[1], 32 do look(string.sub(ARGV[1], at, at + 31)) end
if ARGV[1] == '' then
    for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do look(key) end
    for _, key in ipairs(redis.call('HKEYS', KEYS[2])) do look(key) end
end
return 1
"""
)

# Sums the sizes, which are all there.
COLLECT = (
    BEGIN
    + TOTAL
    + """
total()
return 1
"""
)
