// Package agent composes the node agent: its identity, its one session, its task ledger and executor, the workloads and
// storage of its host, and its diagnostic record.
//
// It decides when this host enrols: when it has no certificate, or when the control plane refuses the certificate that
// it has and there is a token that was not used yet. It acts on typed refusals only. It never mints a credential, never
// changes a tenancy, and never stops a workload because the control plane is away or because the agent itself ends.
//
//	            ┌────────── token ──────────┐        ┌── refused: recover, rebundle (slow cadence, a bundle may come) ──┐
//	            ▼                           │        ▼                                                                  │
//	start ─► enrol ─► identity on disk ─► session ─► work … ────────────────────────────────────────────────────────────┘
//	            └── epoch_superseded ──► ErrReplaced        └── epoch_superseded ──► ErrReplaced: instance ends for good
//
// Guarantees: one agent per state directory; other users cannot read the agent's files; the identity is the same after
// a crash; the workloads of tenants go on when Run returns.
package agent
