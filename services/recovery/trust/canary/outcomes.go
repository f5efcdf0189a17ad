package canary

import recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"

// What a handshake proves.
const (
	Trusted  = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_TRUSTED
	Refused  = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_REFUSED
	Unproven = recoveryv1.HandshakeOutcome_HANDSHAKE_OUTCOME_UNPROVEN
)
