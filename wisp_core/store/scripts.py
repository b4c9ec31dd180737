"""Every Lua script: check-and-act steps that must be one step. All keys of a call share one hash slot."""

from __future__ import annotations

WRITE_PLAN = """
local current = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
if tonumber(ARGV[1]) <= current then return 0 end
redis.call('HSET', KEYS[1], 'revision', ARGV[1], 'plan', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PUBLISH', KEYS[2], ARGV[1])
return 1
"""
"""Store a plan of a higher revision.

KEYS: plan hash, wake-up channel. ARGV: revision, plan JSON, TTL ms. Returns 1 if stored, 0 if not newer.
"""

WRITE_SIGNATURES = """
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, ARGV[1], ARGV[3 + i])
  redis.call('PEXPIRE', key, ARGV[2])
  while redis.call('HLEN', key) > tonumber(ARGV[3]) do
    local oldest, oldest_s
    local parts = redis.call('HGETALL', key)
    for j = 1, #parts, 2 do
      local at_s = tonumber(string.match(parts[j + 1], '^[^ ]+')) or 0
      if parts[j] ~= ARGV[1] and (oldest == nil or at_s < oldest_s) then oldest, oldest_s = parts[j], at_s end
    end
    redis.call('HDEL', key, oldest)
  end
end
return #KEYS
"""
"""Store one replica's part of each of several signatures, and drop the oldest of others beyond the most to keep.

KEYS: signature hashes. ARGV: replica id, TTL ms, most parts, then each key's part with its time in s in front.
Returns the number of keys.
"""

PLACE = """
local current = redis.call('HMGET', KEYS[1], 'version', 'replica', 'placement')
local answer = ARGV[4]
if current[1] and (current[1] ~= ARGV[1] or current[2] == ARGV[3]) then
  answer = current[3]
else
  redis.call('HSET', KEYS[1], 'version', ARGV[2], 'replica', ARGV[3], 'placement', ARGV[4])
  redis.call('ZADD', KEYS[2], ARGV[5], ARGV[6])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[8]))
end
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return answer
"""
"""Place a session unless another placement got in between.

KEYS: placement hash, index of placements. ARGV: expected version ('' for none), new version, replica id,
placement JSON, its time in s, session key, TTL ms, longest index. Returns the JSON of the placement that holds.
"""

ADMIT = """
local now = tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[1])
if ARGV[8] and redis.call('ZSCORE', KEYS[3], ARGV[8]) then return {'', '', redis.call('HGET', KEYS[4], 'placement')} end
local function full_after(key, amount, per_minute)
  return math.max(now, tonumber(redis.call('GET', key) or '0')) + amount * 60 / per_minute
end
local function keep(key, full)
  redis.call('SET', key, string.format('%.6f', full), 'PX', math.ceil((full - now) * 1000) + 1000)
end
local function refused(limit, wait) return {limit, wait and string.format('%.6f', wait) or ''} end
local requests_per_minute, tokens_per_minute = tonumber(ARGV[2]), tonumber(ARGV[3])
local full = full_after(KEYS[1], tonumber(ARGV[7]), requests_per_minute)
if full - now - 60 > 1e-6 then return refused('requests', full - now - 60) end
keep(KEYS[1], full)
local places, most, tokens = #ARGV - 7, tonumber(ARGV[5]), tonumber(ARGV[4])
if places == 0 then return {'', '', false} end
local next_request = full + 60 / requests_per_minute - now - 60
if places > most then return refused('turns') end
if redis.call('ZCARD', KEYS[3]) + places > most then return refused('turns', math.max(1, next_request)) end
if tokens > tokens_per_minute then return refused('tokens') end
full = full_after(KEYS[2], tokens, tokens_per_minute)
if full - now - 60 > 1e-6 then return refused('tokens', math.max(full - now - 60, next_request)) end
keep(KEYS[2], full)
for i = 8, #ARGV do redis.call('ZADD', KEYS[3], now + tonumber(ARGV[6]), ARGV[i]) end
redis.call('PEXPIRE', KEYS[3], math.ceil(tonumber(ARGV[6]) * 1000) + 1000)
return {'', '', redis.call('HGET', KEYS[4], 'placement')}
"""
"""Admit a turn against requests and tokens per minute and places for turns: once, however often it asks.

A turn that is refused takes its request all the same, and nothing else; one without places asks for no more than that.
A bucket is kept as the time at which it will be full again; what is missing from it now is that time's distance.
KEYS: requests bucket, tokens bucket, places taken, the session's placement hash. ARGV: now s, requests per minute,
tokens per minute, tokens, most places, lease s, requests, then the turn's places. Returns {'', '', the placement's JSON
or nil} if admitted, else {limit, seconds to wait, '' if it can never be}: as long as both buckets need. When a running
turn will end is not known, so a full house says one second.
"""

RECORD_TURN = """
local at = 11
for _ = 1, tonumber(ARGV[9]) do
  redis.call('HINCRBYFLOAT', KEYS[1], ARGV[at], ARGV[at + 1])
  at = at + 2
end
if redis.call('HEXISTS', KEYS[6], ARGV[10]) == 1 then
  for i = at, #ARGV, 2 do redis.call('HINCRBY', KEYS[2], ARGV[i], ARGV[i + 1]) end
end
if ARGV[9] ~= '0' then
  redis.call('HSET', KEYS[1], 'replica_id', ARGV[3], 'last_turn_at_s', ARGV[2])
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  redis.call('EXPIRE', KEYS[3], ARGV[4])
  redis.call('ZADD', KEYS[4], ARGV[2], ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - tonumber(ARGV[5]))
end
redis.call('LPUSH', KEYS[5], ARGV[6])
redis.call('LTRIM', KEYS[5], 0, tonumber(ARGV[7]) - 1)
redis.call('EXPIRE', KEYS[5], ARGV[8])
return 1
"""
"""Add a turn to what its session and its tenant have used, and keep the session's placement alive.

A tenant that has been deleted meanwhile has used nothing.
KEYS: session usage, tenant usage, placement hash, index of sessions, turn log, tenants. ARGV: session key, the turn's
time in s, replica id, TTL of a session in s, longest index, TurnRecord JSON, longest log, TTL of the log in s, number
of the session's counters (0: it is not remembered), tenant id, then each of these counters with its amount, then the
tenant's. Returns 1.
"""

SETTLE = """
if redis.call('ZREM', KEYS[2], unpack(ARGV, 3)) == 0 then return 0 end
local now = tonumber(ARGV[1])
local full = math.max(now, tonumber(redis.call('GET', KEYS[1]) or '0')) + tonumber(ARGV[2])
if full > now then
  redis.call('SET', KEYS[1], string.format('%.6f', full), 'PX', math.ceil((full - now) * 1000) + 1000)
else
  redis.call('DEL', KEYS[1])
end
return 1
"""
"""End a turn: give back what it did not use, or take what it used beyond that; a second call does nothing.

A bucket that has no key is full, and so is one that would be full by now: what was used beyond is taken from there.
KEYS: tokens bucket, places taken. ARGV: now s, seconds of refill to take (below 0: to give back), then the turn's
places. Returns 1 if the turn was counted.
"""

ACQUIRE_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""Take or renew a lease. KEYS: lease. ARGV: holder, TTL ms. Returns 1 if held now, 0 if another holds it."""

RELEASE_LEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Give a lease back. KEYS: lease. ARGV: holder. Returns 1 if it was the holder's."""

WRITE_TENANT = """
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored and (ARGV[2] == '' or cjson.decode(stored).at_s ~= tonumber(ARGV[2])) then return 0 end
if not stored and ARGV[2] ~= '' then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
"""Create or replace a tenant, unless somebody else has in between.

KEYS: tenants. ARGV: tenant id, ``at_s`` of what is replaced ('' for none), tenant JSON. Returns 1 if stored, 0 if
another one, or none, is there.
"""

REPEATABLE = frozenset({WRITE_SIGNATURES, PLACE, ADMIT, SETTLE, ACQUIRE_LEASE, RELEASE_LEASE})
"""Scripts that leave the same when they run twice in a row, and answer the same where somebody reads the answer.

Except that a turn which ``ADMIT`` refuses twice, as its first answer was lost, takes two requests.
"""
