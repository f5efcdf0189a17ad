// Package identity owns node identities: their state, their serials, their generations and the fence that shuts them out.
//
// It believes the certificate that nodeapi verified, the join state it signed itself, and the lock on a node's row. It believes nothing that
// an agent says of its host, and no connection that does not answer a challenge: only a live holder of the key can convict, because a paused
// replica may hold any old Hello for as long as it likes. It never touches workspaces or gates: it tells lifecycle, until lifecycle has
// acknowledged.
//
// Judge, JudgeReady and Transition are pure and decide everything; the store locks rows, asks them, and writes what they said.
//
//	pending ──enrol──► active ──hold──────► held ────────┐
//	   │                 │  ───quarantine─► quarantined ─┼─reactivate─► active
//	   │                 └────fence───────► fenced ──────┘ (security)
//	   └──────────────────────retire (from any)──────────► retired, for good
//
// Guarantees, for one node instance: a generation is given to one session; confirmed ≤ issued; a Ready counts only for the last generation
// issued, so at most one session is confirmed; a single agent is never alarmed about and never locked out by lost replies, crashes, late
// calls or paused replicas; of two copies that both go on, one is answered a challenge at its first open after the other was admitted. All of
// this is explored exhaustively in model_test.go.
package identity
