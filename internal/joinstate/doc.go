// Package joinstate owns the signed join state: which generation of which certificate of which node instance the
// control plane has issued.
//
// recovery signs it whenever a session is opened; the agent stores it and presents it when it opens the next one. The
// keys are on disk outside Postgres, so that a database that was restored to an earlier state cannot make an old join
// state look new: a validly signed state with a larger number than the database has is proof that the database lost
// changes.
//
// It trusts only its key set. It never decides whether a state is current: recovery does, by its table. Guarantees: one
// encoding per state, domain-separated, Ed25519 only. Peek reads a state without verifying it, for an agent, which must
// compare numbers and has no key.
//
// It is a package of its own because the agent that keeps a state and the services that sign and verify it must agree
// on every byte of its encoding, and may not import each other.
package joinstate
