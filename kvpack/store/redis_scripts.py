"""The Lua scripts that the Redis backend runs on the server: each is atomic to all other users (names in redis.py).

Only the entries are authoritative. Counts may be lost, or overwritten by any user of the server: every script first removes
values of another type, and ``sound`` checks that the rest is consistent; if not, ``PUT`` asks for a new count.
"""

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
local function touch(chain, seconds)
    local now = microseconds()
    for depth = 1, #chain / 32 do
        local key = string.sub(chain, 32 * depth - 31, 32 * depth)
        redis.call('ZADD', KEYS[1], 'XX', 'GT', string.format('%.0f', now - depth), key)
        if seconds ~= '' then redis.call('EXPIRE', entry(key), seconds) end
    end
    return now
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

# Removes what was used longest ago, but what is kept or pinned, until what is counted fits below ``most``.
# Returns whether it does, entries evicted, and their bytes.
EVICT = """
local function evict(most, chain)
    local kept = {}
    for at = 1, #chain, 32 do kept[string.sub(chain, at, at + 31)] = true end
    for _, pinned in ipairs(redis.call('HVALS', KEYS[4])) do
        for at = 1, #pinned, 32 do kept[string.sub(pinned, at, at + 31)] = true end
    end
    local first, evicted, bytes = 0, 0, 0
    while (tonumber(redis.call('GET', KEYS[3]) or '') or 0) > most do
        local oldest = redis.call('ZRANGE', KEYS[1], first, first)[1]
        if not oldest then return false, evicted, bytes end
        if kept[oldest] then
            first = first + 1
        else
            local _, freed = remove(oldest)
            evicted, bytes = evicted + 1, bytes + freed
        end
    end
    return true, evicted, bytes
end
"""

# ARGV: chain, entry, most bytes or '', seconds to live or '', '1' to replace what is there, bytes of a front, '1' to sum sizes anew.
# Returns {-1} where nothing can be said of what is stored, {2, front, bytes} of what is there, else {stored, entries evicted, bytes}.
PUT = (
    BEGIN
    + SOUND
    + TOUCH
    + TOTAL
    + EVICT
    + """
local chain, size, most, seconds = ARGV[1], #ARGV[2], tonumber(ARGV[3]), ARGV[4]
if not sound() or (ARGV[7] == '1' and not total()) then return {-1} end
local key = string.sub(chain, -32)
if redis.call('TYPE', entry(key)).ok == 'string' and ARGV[5] ~= '1' then
    local there = redis.call('STRLEN', entry(key))
    if redis.call('HEXISTS', KEYS[2], key) == 0 then count(key, there, microseconds()) end
    return {2, redis.call('GETRANGE', entry(key), 0, ARGV[6] - 1), there}
end
if most and size > most then return {0, 0, 0} end
-- Counted before it is there: an entry that nobody counts would never go. A server without memory refuses this first write.
count(key, size, microseconds())
local fits, evicted, bytes = true, 0, 0
for attempt = 1, 2 do
    if most then
        local more, freed
        fits, more, freed = evict(most, chain)
        evicted, bytes = evicted + more, bytes + freed
    end
    if fits then break end
    if not total() then
        remove(key)
        return {-1}
    end
end
if not fits then
    remove(key)
    return {0, evicted, bytes}
end
local now = touch(string.sub(chain, 1, -33), seconds)
redis.call('DEL', entry(key))
local done = redis.pcall('SET', entry(key), ARGV[2])
if type(done) == 'table' and done.err then
    forget(key)
    return done
end
redis.call('ZADD', KEYS[1], string.format('%.0f', now - #chain / 32), key)
if seconds ~= '' then redis.call('EXPIRE', entry(key), seconds) end
return {1, evicted, bytes}
"""
)

# ARGV: chain, seconds to live or ''.
USE = BEGIN + TOUCH + "touch(ARGV[1], ARGV[2]) return 1"

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

# ARGV: most bytes or ''. Sums the sizes, which are all there, and evicts. Returns {entries evicted, their bytes}.
COLLECT = (
    BEGIN
    + TOTAL
    + EVICT
    + """
local most = tonumber(ARGV[1])
total()
if not most then return {0, 0} end
local _, evicted, bytes = evict(most, '')
return {evicted, bytes}
"""
)
