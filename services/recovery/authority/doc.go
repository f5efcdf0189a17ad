// Package authority serves nodeapi's view of recovery's decisions: which nodes are active, which serials and which
// session of each count.
//
// It believes the rows of recovery.identity in the order of authority_seq, which is the order of commits. One poller
// reads for the whole process; it answers a ping only after a read that began after the ping arrived. It decides
// nothing.
//
//	ping ──► waits for the next poll to begin ──► poll ──► deltas to every watcher ──► pong
//
// Guarantees: a watcher gets a whole snapshot, then every later change once and in order; a pong means that a read of
// Postgres begun after its ping arrived has been sent on. A watcher that does not read is dropped; it comes back and
// takes a snapshot.
package authority
