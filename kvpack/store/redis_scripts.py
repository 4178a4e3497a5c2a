"""The Lua scripts that the Redis backend runs on the server. Each is atomic for all other clients. redis.py lists the keys.

Only the entries are authoritative. Any user of the server may overwrite or remove the counts. Every script therefore first removes values
of the wrong type, and ``sound`` checks that the counts are consistent. If they are not, ``PUT`` requests a new count.
"""

PREFIX = b"{kvpack}:"
ENTRY = PREFIX + b"entry:"
LEASE = PREFIX + b"lease:"
HOLDS = PREFIX + b"holds"
KEYS = [PREFIX + name for name in (b"used", b"sizes", b"bytes", b"holds", b"counted", b"counting", b"summed", b"about", b"abouts")]

# KEYS of all scripts. Members of the sets are 32-byte keys.
NAMES = "local function entry(key) return '{kvpack}:entry:' .. key end"

BEGIN = (
    NAMES
    + """
for number, kind in ipairs({'zset', 'hash', 'string', 'hash', 'set', 'hash', 'string', 'hash', 'hash'}) do
    local found = redis.call('TYPE', KEYS[number]).ok
    if found ~= kind and found ~= 'none' then redis.call('DEL', KEYS[number]) end
end

local function is_number(key)
    local text = redis.call('GET', key)
    return text and string.match(text, '^%d+$') and #text <= 15
end

-- The sum, and a copy of it that only whoever changes both keeps equal.
local known, copied = is_number(KEYS[3]), is_number(KEYS[7])
local function add(bytes)
    if known and bytes ~= 0 then redis.call('INCRBY', KEYS[3], string.format('%.0f', bytes)) end
    if copied and bytes ~= 0 then redis.call('INCRBY', KEYS[7], string.format('%.0f', bytes)) end
end

local function microseconds()
    local clock = redis.call('TIME')
    return clock[1] * 1000000 + clock[2]
end

local function size_of(key)
    local size = redis.call('HGET', KEYS[2], key)
    if not size then return 0 end
    if string.match(size, '^%d+$') and #size <= 15 then return tonumber(size) end
    -- Another program has changed the size, so count everything again.
    redis.call('DEL', KEYS[3], KEYS[7])
    known, copied = false, false
    return 0
end

-- A count goes on in pages: the entries counted so far, and their sum, follow every change.
local counting = redis.call('EXISTS', KEYS[6]) == 1
local function sum(bytes)
    if bytes ~= 0 then redis.call('HINCRBY', KEYS[6], 'sum', string.format('%.0f', bytes)) end
end

local function count(key, size, used)
    local before = size_of(key)
    redis.call('HSET', KEYS[2], key, size)
    redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', used), key)
    add(size - before)
    if counting then sum(redis.call('SADD', KEYS[5], key) == 1 and size or size - before) end
end

-- Adds to the totals of a text, which redis_count.py explains. They start again if another program has changed them.
local function add_about(id, entries, bytes)
    local count = redis.pcall('HINCRBY', KEYS[9], 'entries ' .. id, entries)
    local sum = redis.pcall('HINCRBY', KEYS[9], 'bytes ' .. id, bytes)
    if type(count) == 'table' or type(sum) == 'table' then
        redis.call('UNLINK', KEYS[8], KEYS[9])
    elseif count <= 0 then
        redis.call('HDEL', KEYS[9], 'entries ' .. id, 'bytes ' .. id, 'text ' .. id)
    end
end

local function undescribe(key)
    local about = redis.call('HGET', KEYS[8], key)
    if not about then return end
    redis.call('HDEL', KEYS[8], key)
    local id, size = string.match(about, '^(%x+) (%d+)$')
    if id then add_about(id, -1, '-' .. size) end
end

local function describe(key, text, size)
    undescribe(key)
    if text == '' then return end
    local id, bytes = string.sub(redis.sha1hex(text), 1, 12), string.format('%.0f', size)
    redis.call('HSET', KEYS[8], key, id .. ' ' .. bytes)
    redis.call('HSETNX', KEYS[9], 'text ' .. id, text)
    add_about(id, 1, bytes)
end

local function forget(key)
    local size = size_of(key)
    undescribe(key)
    redis.call('ZREM', KEYS[1], key)
    redis.call('HDEL', KEYS[2], key)
    add(-size)
    if counting and redis.call('SREM', KEYS[5], key) == 1 then sum(-size) end
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
    local bytes, entries = known and tonumber(redis.call('GET', KEYS[3])), redis.call('ZCARD', KEYS[1])
    if bytes and entries == redis.call('HLEN', KEYS[2]) and bytes >= entries and (entries > 0 or bytes == 0) then return true end
    -- A sum that is wrong must not look right again while the entries are counted.
    if known or copied then redis.call('DEL', KEYS[3], KEYS[7]) end
    known, copied = false, false
    return false
end
"""

# ``pinned_until`` returns the end of a key's last pin in seconds since 1970, or nil.
PINNED = """
local function keys_of(text, ends, finish)
    for at = 1, #text, 32 do
        local key = string.sub(text, at, at + 31)
        ends[key] = math.max(ends[key] or 0, finish)
    end
end

local pins
local function add_hold(field, hold, now)
    -- Ignore values that are not pins.
    if #hold < 18 or string.sub(hold, 1, 8) ~= 'kvphold1' then return end
    local finish = 0
    for at = 16, 9, -1 do finish = 256 * finish + string.byte(hold, at) end
    if finish > now then
        keys_of(string.sub(hold, 19 + string.byte(hold, 17) + 256 * string.byte(hold, 18)), pins, finish)
    else
        redis.call('HDEL', KEYS[4], field)
    end
end

local function pinned_until(key)
    if not pins then
        pins = {}
        local holds, now = redis.call('HGETALL', KEYS[4]), tonumber(redis.call('TIME')[1])
        for at = 1, #holds, 2 do add_hold(holds[at], holds[at + 1], now) end
    end
    return pins[key]
end

-- An entry expires so many seconds after its last use, and not before its last pin ends; without seconds it does not expire.
local function expire(key, seconds, now)
    local finish = seconds ~= '' and pinned_until(key) or 0
    if seconds == '' or finish >= 1e11 then
        redis.call('PERSIST', entry(key))
    elseif finish > now / 1000000 + seconds then
        redis.call('EXPIREAT', entry(key), string.format('%.0f', finish))
    else
        redis.call('EXPIRE', entry(key), seconds)
    end
end
"""

TOUCH = """
local function touch(chain, seconds, before, now)
    for depth = 1, #chain / 32 do
        local key = string.sub(chain, 32 * depth - 31, 32 * depth)
        redis.call('ZADD', KEYS[1], 'XX', 'GT', string.format('%.0f', now - before - depth), key)
        expire(key, seconds, now)
    end
end
"""

# Evict the least recently used entries, except kept and pinned ones, until the total is at most ``most``: up to one page of entries.
# ``first`` is the number of oldest entries known to be kept. Returns 1 if the total fits, 0 if nothing more can be evicted, or 3 at the end
# of the page, followed by the number of evicted entries, their bytes, and ``first``.
EVICT = """
local PAGE, STEP = 200, 20

local function evict(most, kept, first)
    local looked, evicted, bytes = 0, 0, 0
    local excess = (tonumber(redis.call('GET', KEYS[3]) or '') or 0) - most
    while excess > bytes do
        if looked >= PAGE then return 3, evicted, bytes, first end
        local oldest = redis.call('ZRANGE', KEYS[1], first, first + STEP - 1)
        if #oldest == 0 then return 0, evicted, bytes, first end
        for _, key in ipairs(oldest) do
            if excess <= bytes then break end
            looked = looked + 1
            if kept[key] or pinned_until(key) then
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

# ARGV: chain, maximum bytes or '', seconds to live or '', '1' to replace existing entries, size of a front, '1' if the sum of the sizes is
# unknown, then for each entry its position in the chain (from 1), its descriptive text or '', and its bytes. With an unknown sum, an entry
# is stored if the server's memory has room for it, or in exchange for older entries with the same total size. Returns {-1} if the counts
# are invalid and the sum was not passed as unknown, else {number of evicted entries, their bytes, the server's error or '', {result, ...}}.
# A result is 1 for a stored entry, 0 for an entry that does not fit, 3 if more must be evicted first, and {front, size} for an existing
# entry. The first 0 or 3 ends the call.
PUT = (
    BEGIN
    + SOUND
    + PINNED
    + EVICT
    + """
local chain, most, seconds, replaces = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4] == '1'
local exchanges, free = ARGV[6] == '1', 0
if not sound() and not exchanges then return {-1} end
if exchanges and most then
    -- All entries are in the server's memory, so they are not larger together.
    local memory = redis.pcall('INFO', 'memory')
    local used = type(memory) == 'string' and tonumber(string.match(memory, 'used_memory:(%d+)') or '')
    free = used and math.max(0, most - used) or 0
end
local now = microseconds()
local kept, noted, results, evicted, bytes, message, state, last = {}, 0, {}, 0, 0, '', 1, nil

-- Evicts entries that are as large together as ``size`` without what is free, or none. Looks at no more than a page.
local function exchange(size)
    local first, freed, keys = 0, 0, {}
    while free + freed < size do
        local oldest = redis.call('ZRANGE', KEYS[1], first, first + STEP - 1)
        if first >= PAGE or #oldest == 0 then return 0 end
        for _, key in ipairs(oldest) do
            if free + freed < size and not kept[key] and not pinned_until(key) then
                table.insert(keys, key)
                freed = freed + (redis.call('TYPE', entry(key)).ok == 'string' and redis.call('STRLEN', entry(key)) or 0)
            end
        end
        first = first + STEP
    end
    for _, key in ipairs(keys) do remove(key) end
    evicted, bytes, free = evicted + #keys, bytes + freed, free + freed - size
    return 1
end

local function make_room(size)
    if exchanges then return exchange(size) end
    local fits, more, freed = evict(most, kept, 0)
    evicted, bytes = evicted + more, bytes + freed
    return fits
end

local function put(place, text, entry_bytes)
    local key = string.sub(chain, 32 * place - 31, 32 * place)
    if redis.call('TYPE', entry(key)).ok == 'string' and not replaces then
        local there = redis.call('STRLEN', entry(key))
        if redis.call('HEXISTS', KEYS[2], key) == 0 then count(key, there, now) end
        return {redis.call('GETRANGE', entry(key), 0, ARGV[5] - 1), there}
    end
    if most and #entry_bytes > most then return 0 end
    -- Count the entry before writing it: an uncounted entry would never be evicted. Without memory, the server rejects this write.
    count(key, #entry_bytes, now)
    if most then
        keys_of(string.sub(chain, 32 * noted + 1, 32 * place), kept, 1)
        noted = place
        local fits = make_room(#entry_bytes)
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
    -- The last use must be before that of the entries that this one continues.
    local used = now - place
    local parent = place > 1 and tonumber(redis.call('ZSCORE', KEYS[1], string.sub(chain, 32 * place - 63, 32 * place - 32)) or '')
    used = math.min(used, (parent or used + 1) - 1, (last or used + 1) - 1)
    last = used
    redis.call('ZADD', KEYS[1], string.format('%.0f', used), key)
    describe(key, text, #entry_bytes)
    expire(key, seconds, now)
    return 1
end

for number = 7, #ARGV, 3 do
    local result = state == 1 and put(tonumber(ARGV[number]), ARGV[number + 1], ARGV[number + 2]) or state
    if result == 0 or result == 3 then state = result end
    table.insert(results, result)
end
return {evicted, bytes, message, results}
"""
)

# ARGV: maximum bytes, chain to keep, number of oldest entries known to be kept. Returns the result of ``evict``.
ROOM = (
    BEGIN
    + PINNED
    + EVICT
    + """
local kept = {}
keys_of(ARGV[2], kept, 1)
return {evict(tonumber(ARGV[1]), kept, tonumber(ARGV[3]))}
"""
)

# ARGV: part of a chain, seconds to live or '', number of the chain's keys before it.
USE = BEGIN + PINNED + TOUCH + "touch(ARGV[1], ARGV[2], tonumber(ARGV[3]), microseconds()) return 1"

# ARGV: the name of a pin, its bytes, its chain, and its end in seconds since 1970. Its entries do not expire before then.
PIN = (
    BEGIN
    + """
redis.call('HSET', KEYS[4], ARGV[1], ARGV[2])
local now = tonumber(redis.call('TIME')[1])
for at = 1, #ARGV[3], 32 do
    local name = entry(string.sub(ARGV[3], at, at + 31))
    local left = redis.call('TTL', name)
    if left >= 0 and tonumber(ARGV[4]) >= 1e11 then
        redis.call('PERSIST', name)
    elseif left >= 0 and now + left < tonumber(ARGV[4]) then
        redis.call('EXPIREAT', name, ARGV[4])
    end
end
return 1
"""
)

# ARGV: concatenated keys. Returns the keys of the entries that existed.
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

# ARGV: a key, the token of its lease's holder. Ends the lease unless someone else holds it.
RELEASE = """
local name = '{kvpack}:lease:' .. ARGV[1]
if redis.call('TYPE', name).ok ~= 'string' or redis.call('GET', name) ~= ARGV[2] then return 0 end
return redis.call('DEL', name)
"""

# ARGV: concatenated keys, number of bytes. Returns the number of counted entries that are missing (and removes them from the counts), then
# for each key the size of its entry (or 0), and its first bytes, or an error for a value of another type.
FRONTS = (
    BEGIN
    + """
local found, gone = {0}, 0
for at = 1, #ARGV[1], 32 do
    local key = string.sub(ARGV[1], at, at + 31)
    local front = redis.pcall('GETRANGE', entry(key), 0, ARGV[2] - 1)
    local size = type(front) == 'string' and #front or 0
    if size == tonumber(ARGV[2]) then size = redis.call('STRLEN', entry(key)) end
    if size == 0 and redis.call('EXISTS', entry(key)) == 0 and redis.call('HEXISTS', KEYS[2], key) == 1 then
        forget(key)
        gone = gone + 1
    end
    table.insert(found, size)
    table.insert(found, (size > 0 or type(front) == 'table') and front or '')
end
found[1] = gone
return found
"""
)

# ARGV: the cursor, the page size. Returns the next cursor and, for each entry on this page of the server's names, its key, its size and its
# last use (0: unknown). The two numbers take 8 bytes each. Changes nothing.
LIST = (
    NAMES
    + """
local used, found = redis.call('TYPE', KEYS[1]).ok == 'zset', {}
local first = #entry('') + 1
local page = redis.call('SCAN', ARGV[1], 'MATCH', entry('*'), 'COUNT', ARGV[2])
for _, name in ipairs(page[2]) do
    local key, size = string.sub(name, first), redis.pcall('STRLEN', name)
    if #key == 32 and type(size) == 'number' then
        local last = used and tonumber(redis.call('ZSCORE', KEYS[1], key) or '') or 0
        table.insert(found, key .. struct.pack('<I8I8', size, last > 0 and last < 2^53 and last or 0))
    end
end
return {page[1], table.concat(found)}
"""
)

# Returns {entries, bytes}, or {-1} if the counts are invalid.
SIZE = BEGIN + SOUND + "if not sound() then return {-1} end return {redis.call('ZCARD', KEYS[1]), tonumber(redis.call('GET', KEYS[3]))}"
