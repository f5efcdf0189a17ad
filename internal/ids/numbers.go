package ids

// EraShift is by how many bits the era of the database is shifted left above the counters: every number drawn in a
// later era is larger than any of an earlier one, so that what nodes and providers remember survives a restore.
const EraShift = 40

// Epoch counts the launches of a workspace: one per launch, never falling.
type Epoch int64

// Generation counts the sessions of a node; it is the session epoch.
type Generation int64

// Fence counts the changes of a node's gate, or the leases of a saga run; the holder of a lower fence has lost the gate
// or the lease.
type Fence int64

// OpSeq counts (step, direction, attempt) of a workspace.
type OpSeq int64

// Number is any of the counters that carry the era.
type Number interface{ ~int64 }

// NextWithEra returns the number after n in the given era: max(n+1, era << 40). It is the same arithmetic as
// mesh.next(n) in SQL.
func NextWithEra[N Number](n N, era int64) N {
	return max(n+1, N(era<<EraShift))
}
