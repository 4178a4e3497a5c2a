"""Lua scripts that count or describe all entries on a Redis server, one page per call (redis_count.py)."""

from .redis_scripts import BEGIN, SOUND

# ARGV: what to scan ('sizes', then 'used', then the server's 'names'), the cursor, the page size. Counts the current sizes of these
# entries and removes missing ones. Returns the next cursor and the number of missing entries.
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

# ARGV: 1 to start summing the sizes, 2 to start after a scan of all names, unless another client has started; 0 to continue; the page size;
# 1 to accept a sum from the last minutes that only these scripts have changed since. Returns 0 until all sizes are summed, then 1; -1 if
# the counts are invalid.
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

# Returns the number of all entries, the number of described entries, the bytes of all, and the fields and values of the totals. Returns {}
# if the counts are invalid.
TOTALS = (
    BEGIN
    + SOUND
    + """
if not sound() then return {} end
local found = redis.call('HGETALL', KEYS[9])
for _, number in ipairs({tonumber(redis.call('GET', KEYS[3])), redis.call('HLEN', KEYS[8]), redis.call('ZCARD', KEYS[1])}) do
    table.insert(found, 1, number)
end
return found
"""
)

# ARGV: what to scan ('about', then 'sizes'), the cursor, the page size, the digits of a text. The first scan corrects descriptions of
# entries that no longer exist or have a different size. The second returns the next cursor and, for each entry without a description or
# with that text, its key, and its size and last use in 8 bytes each.
MISSING = (
    BEGIN
    + """
local found = {}
local page = redis.call('HSCAN', ARGV[1] == 'about' and KEYS[8] or KEYS[2], ARGV[2], 'COUNT', ARGV[3])
for at = 1, #page[2], 2 do
    local key, value = page[2][at], page[2][at + 1]
    if ARGV[1] == 'about' then
        local size = redis.call('HGET', KEYS[2], key)
        if not size or string.match(value, ' (%d+)$') ~= size then undescribe(key) end
    elseif #key == 32 then
        local about = redis.call('HGET', KEYS[8], key)
        if not about or string.match(about, '^%x+') == ARGV[4] then
            local used = tonumber(redis.call('ZSCORE', KEYS[1], key) or '') or 0
            table.insert(found, key .. struct.pack('<I8I8', size_of(key), used > 0 and used < 2^53 and used or 0))
        end
    end
end
return {page[1], table.concat(found)}
"""
)

# ARGV: for each entry its key and its text. Returns the number of entries described.
DESCRIBE = (
    BEGIN
    + """
local done = 0
for at = 1, #ARGV, 2 do
    if redis.call('HEXISTS', KEYS[2], ARGV[at]) == 1 then
        describe(ARGV[at], ARGV[at + 1], size_of(ARGV[at]))
        done = done + 1
    end
end
return done
"""
)
