"""The Lua scripts that the Redis backend runs on the server; each is atomic for all other users (names in redis.py).

Only the entries are authoritative. Any user of the server may overwrite or remove the counts, so every script first removes values of the
wrong type, and ``sound`` checks that the counts are consistent. If they are not, ``PUT`` requests a new count.
"""

PREFIX = b"{kvpack}:"
ENTRY = PREFIX + b"entry:"
LEASE = PREFIX + b"lease:"
PINS = PREFIX + b"pins"
HOLDS = PREFIX + b"holds"
USED = PREFIX + b"used"
KEYS = [USED, PREFIX + b"sizes", PREFIX + b"bytes", PINS, PREFIX + b"counted", PREFIX + b"counting", PREFIX + b"summed", HOLDS]

# KEYS of all scripts: used, sizes, bytes, pins, counted, counting, summed, holds. Members of the sets are 32-byte keys.
NAMES = "local function entry(key) return '{kvpack}:entry:' .. key end"

BEGIN = (
    NAMES
    + """
for number, kind in ipairs({'zset', 'hash', 'string', 'hash', 'set', 'hash', 'string', 'hash'}) do
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

local function forget(key)
    local size = size_of(key)
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
        redis.call('HDEL', KEYS[8], field)
    end
end

local function pinned_until(key)
    if not pins then
        pins = {}
        for _, pinned in ipairs(redis.call('HVALS', KEYS[4])) do keys_of(pinned, pins, math.huge) end
        local holds, now = redis.call('HGETALL', KEYS[8]), tonumber(redis.call('TIME')[1])
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
# ``first`` is the number of oldest entries known to be kept. Returns 1 if the total fits, 0 if nothing more can be evicted, 3 at the
# end of the page, then the number of evicted entries, their bytes, and ``first``.
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

# ARGV: chain, maximum bytes or '', seconds to live or '', '1' to replace existing entries, size of a front, '1' if the sum of the sizes
# is unknown, then for each entry its position in the chain, from 1 on, and its bytes. With an unknown sum, an entry is stored if the
# server's memory has room for it, or in exchange for older entries that are as large together. Returns {-1} if the counts are invalid and
# the sum is not said to be unknown, else {number of evicted entries, their bytes, the server's error or '', {result, ...}}. A result is
# 1 for a stored entry, 0 for one that does not fit, 3 if more must be evicted first, and {front, size} for an existing entry. The first
# 0 or 3 ends the call.
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

local function put(place, entry_bytes)
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
    expire(key, seconds, now)
    return 1
end

for number = 7, #ARGV, 2 do
    local result = state == 1 and put(tonumber(ARGV[number]), ARGV[number + 1]) or state
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
redis.call('HSET', KEYS[8], ARGV[1], ARGV[2])
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

# ARGV: a key, the token of its lease's holder. Ends the lease unless it has another holder.
RELEASE = """
local name = '{kvpack}:lease:' .. ARGV[1]
if redis.call('TYPE', name).ok ~= 'string' or redis.call('GET', name) ~= ARGV[2] then return 0 end
return redis.call('DEL', name)
"""

# ARGV: concatenated keys. Removes the keys of missing entries from the counts, and returns the number removed.
FORGET = (
    BEGIN
    + """
local gone = 0
for at = 1, #ARGV[1], 32 do
    local key = string.sub(ARGV[1], at, at + 31)
    if redis.call('EXISTS', entry(key)) == 0 and redis.call('HEXISTS', KEYS[2], key) == 1 then
        forget(key)
        gone = gone + 1
    end
end
return gone
"""
)

# ARGV: concatenated keys. Returns for each key the size of its entry, or 0, and its last use, or ''. Changes nothing.
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

# Returns {entries, bytes}, or {-1} if the counts are invalid.
SIZE = BEGIN + SOUND + "if not sound() then return {-1} end return {redis.call('ZCARD', KEYS[1]), tonumber(redis.call('GET', KEYS[3]))}"

# ARGV: what to scan ('sizes', then 'used', then the server's 'names'), the cursor, the page size. Counts the current sizes of these
# entries and removes missing ones. Returns the next cursor, and the numbers of counted and of missing entries.
RECOUNT = (
    BEGIN
    + """
local now, gone = microseconds(), 0
local function look(key)
    if #key == 32 and redis.call('TYPE', entry(key)).ok == 'string' then
        count(key, redis.call('STRLEN', entry(key)), now)
    else
        gone = gone + redis.call('HEXISTS', KEYS[2], key)
        forget(key)
    end
end
local first = #entry('') + 1
if ARGV[1] == 'names' then
    local page = redis.call('SCAN', ARGV[2], 'MATCH', entry('*'), 'COUNT', ARGV[3])
    for _, name in ipairs(page[2]) do
        local key = string.sub(name, first)
        if #key == 32 and redis.call('HEXISTS', KEYS[2], key) == 0 then look(key) end
    end
    return {page[1], gone}
end
if ARGV[1] == 'used' then
    local page = redis.call('ZSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
    for at = 1, #page[2], 2 do
        if redis.call('HEXISTS', KEYS[2], page[2][at]) == 0 then look(page[2][at]) end
    end
    return {page[1], gone}
end
local page = redis.call('HSCAN', KEYS[2], ARGV[2], 'COUNT', ARGV[3])
for at = 1, #page[2], 2 do
    local key = page[2][at]
    local found = #key == 32 and redis.call("TYPE", entry(key)).ok == "string" and redis.call("STRLEN", entry(key))
    local same = found and tostring(found) == page[2][at + 1]
    if not (same and redis.call('ZSCORE', KEYS[1], key)) then look(key) end
end
return {page[1], gone}
"""
)

# ARGV: 1 to start summing the sizes, 2 to start after a scan of all names, unless another client has started; 0 to continue; the page
# size; 1 to accept a sum from the last minutes that only these scripts have changed since.
# Returns 0 until all are summed, then 1; -1 if the counts are invalid.
SUM = (
    BEGIN
    + SOUND
    + """
local KEPT_MS, TRIES = 600000, 3

local function begin(tries)
    redis.call('UNLINK', KEYS[5])
    redis.call('HSET', KEYS[6], 'cursor', '0', 'sum', '0', 'tries', tries)
end

local function stop(result)
    redis.call('UNLINK', KEYS[5], KEYS[6])
    return result
end

if not counting then
    if ARGV[1] == '0' then return 1 end
    if ARGV[1] == '1' and not sound() then return -1 end
    if ARGV[3] == '1' and copied and redis.call('GET', KEYS[7]) == redis.call('GET', KEYS[3]) then return 1 end
    begin(0)
end
if ARGV[1] == '2' then redis.call('HSET', KEYS[6], 'whole', '1') end
local page = redis.call('HSCAN', KEYS[2], redis.call('HGET', KEYS[6], 'cursor') or '0', 'COUNT', ARGV[2])
local bytes, keys, sizes = 0, {}, {}
local fields, match = page[2], string.match
for at = 1, #fields / 2 do
    local size = fields[2 * at]
    if not match(size, '^%d+$') or #size > 15 then return stop(-1) end
    keys[at], sizes[at] = fields[2 * at - 1], tonumber(size)
end
for first = 1, #keys, 1000 do
    local last = math.min(first + 999, #keys)
    -- One call for many keys. Servers before 6.2 do not support it.
    local counted = redis.pcall('SMISMEMBER', KEYS[5], unpack(keys, first, last))
    if counted.err then
        counted = {}
        for at = first, last do table.insert(counted, redis.call('SISMEMBER', KEYS[5], keys[at])) end
    end
    redis.call('SADD', KEYS[5], unpack(keys, first, last))
    for at = first, last do
        if counted[at - first + 1] == 0 then bytes = bytes + sizes[at] end
    end
end
sum(bytes)
if page[1] == '0' then
    local total = tonumber(redis.call('HGET', KEYS[6], 'sum'))
    if redis.call('HGET', KEYS[6], 'whole') ~= '1' and not sound() then return stop(-1) end
    if redis.call('SCARD', KEYS[5]) == redis.call('HLEN', KEYS[2]) then
        for at = 3, 7, 4 do redis.call('SET', KEYS[at], string.format('%.0f', total)) end
        redis.call('PEXPIRE', KEYS[7], 2 * KEPT_MS)
        return stop(1)
    end
    -- A program that does not support counting in pages has changed entries in the meantime.
    local tries = tonumber(redis.call('HGET', KEYS[6], 'tries') or '') or 0
    if tries >= TRIES then
        redis.call('SET', KEYS[3], string.format('%.0f', math.max(total, tonumber(redis.call('GET', KEYS[3]) or '') or 0)))
        return stop(1)
    end
    begin(tries + 1)
else
    redis.call('HSET', KEYS[6], 'cursor', page[1])
end
local clock = redis.call('TIME')
for at = 5, 6 do redis.call('PEXPIREAT', KEYS[at], clock[1] * 1000 + KEPT_MS) end
return 0
"""
)
