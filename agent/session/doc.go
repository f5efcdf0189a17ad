// Package session owns the agent's one stream to the control plane: opening it, keeping it, replacing it without a gap,
// and leaving it.
//
// It believes the server whose certificate its pinned roots verify as service/nodeapi, the Identity's files, and a
// typed Denial; after an error without one it only tries again later. It never runs tasks, never enrols, and never
// decides what follows from a refusal of its identity: Run ends with *StopError or *IdentityError, and its caller
// decides.
//
//	          ┌───────────────────────────── backoff, diagnostic on disk first ─────────────────────────────┐
//	          ▼                                                                                              │
//	dial ─► Hello ─► Welcome ─► join state on disk ─► Ready ─► Admitted ─► heartbeats, offers, results ─► ended
//	                                                              │
//	                     Reconnect, or the next certificate held: ├─► dial a replacement, Hello{replaces_nonce}
//	                                                                    ─► Admitted ─► drain the old ≤ 30 s
//
// Guarantees. At most one open is in flight, and nothing is read from a connection after the client has given it up.
// Ready follows only a join state on disk with a larger generation. A session opens with a certificate only after that
// certificate is durably the one in use. That a certificate has expired by this host's clock is a hint, since the clock
// may be wrong: the client tries to open with it, at a slow cadence while nothing answers, and only a refusal by the
// server ends Run. A certificate that a verified server refuses for another reason than its end is tried again, at
// least three times over RefusedFor and a random part of RefusedSpread, before Run ends. While a replacement opens, the
// old session goes on; queued frames are sent by the session that was admitted last. Every queue is bounded, every
// goroutine is waited for, and a retry never comes before its diagnostic record is on disk or before the time a peer
// asked for. The end of the certificate in use overrides the time that a peer asked for: a retry comes while the time
// that a hand-over needs is left (a sixth of the certificate's life, at most a minute) and at ever shorter intervals
// after that, and when a certificate ends the client tries the other one before Run gives up.
//
// Each phase of an opening (connection, TLS handshake, Welcome, Admitted) has a short timeout of its own, which starts
// again with every frame that the server sends. After a timeout the next open takes another address of the name, at
// once until each address was tried; then the waits and the timeouts grow.
//
// Load generators use a Client without a disk (package memory): an idle session costs two goroutines beside grpc's own.
package session
