package trust

import recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"

// The outcomes of a handshake.
const (
	trusted  = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_TRUSTED
	refused  = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_REFUSED
	unproven = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_UNPROVEN
)
