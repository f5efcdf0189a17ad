package workspace

// occupying returns the kinds of claims whose resource may still use a slot and its devices.
func occupying() []string { return []string{kindSlot, kindInstance, kindStorage, kindWorkload} }

// Kinds of claims.
const (
	kindSlot     = "slot"
	kindIdentity = "identity"
	kindInstance = "instance"
	kindStorage  = "storage"
	kindHandle   = "handle"
	kindSchema   = "schema"
	kindWorkload = "workload"
)
