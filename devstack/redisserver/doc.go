// Package redisserver runs a small Redis of our own, for `gpuaas dev`, the drills and the tests.
//
// It owns the process and nothing else: it keeps no data on disk, since losing Redis costs latency and never
// correctness. It takes the server as started only when a PING was answered. Without a redis-server on PATH it serves
// an in-process imitation on the same kind of address, whose expiry is driven by a ticker; drills of expiry and fencing
// check Real first.
//
// Guarantees: a server never outlives its process on Linux; Start returns only after a PING was answered; the address
// stays the same over Kill and Restart.
package redisserver
