package allocation

// occupying returns the kinds of claims whose resource may still use a slot and its devices.
func occupying() []string { return []string{KindSlot, KindInstance, KindStorage, KindWorkload} }

// Kinds of claims.
const (
	KindSlot     = "slot"
	KindIdentity = "identity"
	KindInstance = "instance"
	KindStorage  = "storage"
	KindHandle   = "handle"
	KindSchema   = "schema"
	KindWorkload = "workload"
)
