"""What the Redis backend does in one step on the server, in Lua: no other user sees a state in between (names in redis.py)."""

# KEYS in all: used, sizes, bytes, pins. Members of the sets are keys of 32 bytes.
REMOVE = """
local function remove(key)
    local size = redis.call('HGET', KEYS[2], key)
    redis.call('ZREM', KEYS[1], key)
    if size then
        redis.call('HDEL', KEYS[2], key)
        redis.call('DECRBY', KEYS[3], size)
    end
    return redis.call('DEL', '{kvpack}:entry:' .. key), tonumber(size or 0)
end
"""

TOUCH = """
local function touch(chain, seconds)
    local clock = redis.call('TIME')
    local now = clock[1] * 1000000 + clock[2]
    for depth = 1, #chain / 32 do
        local key = string.sub(chain, 32 * depth - 31, 32 * depth)
        redis.call('ZADD', KEYS[1], 'XX', 'GT', string.format('%.0f', now - depth), key)
        if seconds ~= '' then redis.call('EXPIRE', '{kvpack}:entry:' .. key, seconds) end
    end
    return now
end
"""

# Removes what was used longest ago, but what is kept or pinned, until ``room`` more bytes fit below ``most``.
# Returns whether they do, entries evicted, and their bytes.
EVICT = """
local function evict(most, room, chain)
    local kept = {}
    for at = 1, #chain, 32 do kept[string.sub(chain, at, at + 31)] = true end
    for _, pinned in ipairs(redis.call('HVALS', KEYS[4])) do
        for at = 1, #pinned, 32 do kept[string.sub(pinned, at, at + 31)] = true end
    end
    local first, evicted, bytes = 0, 0, 0
    while tonumber(redis.call('GET', KEYS[3]) or 0) + room > most do
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

# ARGV: chain, entry, most bytes or '', seconds to live or ''. Returns {stored, entries evicted, their bytes}.
PUT = (
    REMOVE
    + TOUCH
    + EVICT
    + """
local chain, size, most = ARGV[1], #ARGV[2], tonumber(ARGV[3])
local key = string.sub(chain, -32)
local name = '{kvpack}:entry:' .. key
if redis.call('EXISTS', name) == 1 then return {2, 0, 0} end
remove(key)
if most and size > most then return {0, 0, 0} end
local fits, evicted, bytes = true, 0, 0
if most then fits, evicted, bytes = evict(most, size, chain) end
if not fits then return {0, evicted, bytes} end
local now = touch(string.sub(chain, 1, -33), ARGV[4])
redis.call('SET', name, ARGV[2])
if ARGV[4] ~= '' then redis.call('EXPIRE', name, ARGV[4]) end
redis.call('ZADD', KEYS[1], string.format('%.0f', now - #chain / 32), key)
redis.call('HSET', KEYS[2], key, size)
redis.call('INCRBY', KEYS[3], size)
return {1, evicted, bytes}
"""
)

# ARGV: chain, seconds to live or ''.
USE = TOUCH + "touch(ARGV[1], ARGV[2]) return 1"

# ARGV: keys, one after the other. Returns those of the entries that there were.
DELETE = (
    REMOVE
    + """
local removed = {}
for at = #ARGV[1] - 31, 1, -32 do
    local key = string.sub(ARGV[1], at, at + 31)
    if remove(key) == 1 then table.insert(removed, key) end
end
return removed
"""
)

# ARGV: most bytes or ''. Forgets entries that have expired, then evicts. Returns {entries evicted, their bytes}.
COLLECT = (
    REMOVE
    + EVICT
    + """
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if redis.call('EXISTS', '{kvpack}:entry:' .. key) == 0 then remove(key) end
end
local most = tonumber(ARGV[1])
if not most then return {0, 0} end
local _, evicted, bytes = evict(most, 0, '')
return {evicted, bytes}
"""
)
