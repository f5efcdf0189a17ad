package enrol

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/policy"
)

// NodePolicy returns the heartbeat policy that an agent is sent. The heartbeat interval is a twelfth of the silence
// that is tolerated, so that several heartbeats may be lost before the session counts as late. nodeapi lengthens it
// with the size of the fleet.
func NodePolicy(set policy.Set) *commonv1.NodePolicy {
	heartbeat := min(max(set.HeartbeatStaleAfter()/12, 500*time.Millisecond), 15*time.Second)
	return &commonv1.NodePolicy{
		HeartbeatInterval: durationpb.New(heartbeat), CertificateTtl: durationpb.New(set.CertificateTTL()),
		StreamMaxAge: durationpb.New(set.StreamMaxAge()), AutoRecovery: set.AutoRecovery(),
		RecoveryAttemptsPerHour: int32(set.RecoveryAttemptsPerHour()), TrustDwell: durationpb.New(set.TrustDwell()),
		CrashLoopRestarts: int32(set.WorkloadCrashLoopRestarts()),
	}
}
