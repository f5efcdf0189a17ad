// Package session owns the agent's one stream to the control plane: opening it, keeping it, replacing it without a gap, and leaving it.
//
// It believes the server whose certificate its pinned roots verify as service/nodeapi, the Identity's files, and a typed Denial; an error without
// one is only a reason to come again later. It never runs tasks, never enrols, and never decides what a verdict on its identity means: Run ends with
// *StopError or *IdentityError, and its caller decides.
//
//	          ┌───────────────────────────── backoff, diagnostic on disk first ─────────────────────────────┐
//	          ▼                                                                                              │
//	dial ─► Hello ─► Welcome ─► join state on disk ─► Ready ─► Admitted ─► heartbeats, offers, results ─► ended
//	                                                              │
//	                     Reconnect, or the next certificate held: ├─► dial a replacement, Hello{replaces_nonce} ─► Admitted ─► drain the old ≤ 30 s
//
// Guarantees. At most one open is in flight, and nothing is read from a connection after it was given up. Ready
// follows only a join state on disk with a larger generation. A session opens with a certificate only after that
// certificate is durably the one in use, and never with an expired one. While a replacement opens, the old session
// goes on; what is queued goes to the session that was admitted last. Every queue is bounded, every goroutine is
// waited for, and a retry never comes before its diagnostic record is on disk or before the time a peer asked for.
// One thing goes before what a peer asked for: the certificate in use. A retry comes while the time that a hand-over
// needs is left (a sixth of the certificate's life, at most a minute) and at ever shorter intervals after that, and
// when a certificate ends the other one held is tried before Run gives up.
//
// Each phase of an opening (connection, TLS handshake, Welcome, Admitted) has a short time of its own, which starts
// again with every frame that the server sends. When it is over the next open takes another address of the name, at
// once until each address had its turn; then the waits and the times grow.
//
// A Client without a disk (Memory) is what load generators use: an idle session costs two goroutines beside grpc's own.
package session
