// Package identity owns node identities: their state, their serials, their generations and the fence that shuts them
// out.
//
// It believes the certificate that nodeapi verified, the join state it signed itself, and the lock on a node's row. It
// does not rely on what an agent reports of its host, or on a connection that does not answer a challenge: only the
// answer of a live holder of the key is evidence of a copy, because a replica that was paused may deliver an old Hello
// at any later time. It never touches workspaces or gates: package fences sends what it decides to lifecycle.
//
// Package judge and package verbs are pure functions and make every decision; the store locks rows, calls them, and
// writes the results.
//
//	pending ──enrol──► active ──hold──────► held ────────┐
//	   │                 │  ───quarantine─► quarantined ─┼─reactivate─► active
//	   │                 └────fence───────► fenced ──────┘ (security)
//	   └──────────────────────retire (from any)──────────► retired, for good
//
// Guarantees, for one node instance: a generation is given to one session; confirmed ≤ issued; a Ready counts only for
// the last generation issued, so at most one session is confirmed; lost replies, crashes, late calls and paused
// replicas never raise an alarm about a single agent or lock it out; of two copies that both go on, one is challenged
// at its first open after the other was admitted. All of this is explored exhaustively in model_test.go, and drawn at
// random through SQL in histories_test.go, with rotated keys and restored databases.
package identity
