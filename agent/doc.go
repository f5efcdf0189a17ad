// Package agent composes the node agent: its identity, its one session, its task ledger and executor, the workloads and storage of its host, and its
// diagnostic record.
//
// It decides when this host enrols: when it holds no certificate, or when the control plane says that the one it holds will not do and there is a
// token that was not used yet. It believes typed refusals only. It never mints a credential, never changes a tenancy, and never stops a workload because
// the control plane is away or because the agent itself ends.
//
//	            ┌────────── token ──────────┐        ┌── refused: recover, rebundle (slow cadence, a bundle may come) ──┐
//	            ▼                           │        ▼                                                                   │
//	start ─► enrol ─► identity on disk ─► session ─► work … ─────────────────────────────────────────────────────────────┘
//	            └── epoch_superseded ──► ErrReplaced        └── epoch_superseded ──► ErrReplaced: this instance ends for good
//
// Guarantees: one agent per state directory; every file of the agent is closed to others; after a crash the same identity; what runs for tenants goes
// on when Run returns.
package agent
