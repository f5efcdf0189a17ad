// Package observation decides when two observations of a workspace's workloads are the same: agents compare a new one
// with the last that they sent, and replicas of nodeapi with the last that they wrote.
package observation

import (
	"crypto/sha256"
	"fmt"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// Digest is the digest of the parts of an observation that do not change by themselves.
type Digest [sha256.Size]byte

// Of returns the digest of an observation, over all fields but those that change from moment to moment: when it was
// made, how long a workload has run, and in a crash loop everything that another exit changes.
func Of(o *nodev1.Observation) (Digest, error) {
	lasting := proto.CloneOf(o)
	lasting.ObservedAt, lasting.StaleSince = nil, nil
	for i, w := range lasting.GetWorkloads() {
		w.Detail = ""
		if w.GetCrashLoop() {
			lasting.Workloads[i] = &nodev1.WorkloadStatus{Name: w.GetName(), Epoch: w.GetEpoch(), CrashLoop: true}
		}
	}
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(lasting)
	if err != nil {
		return Digest{}, fmt.Errorf("encode observation: %w", err)
	}
	return sha256.Sum256(encoded), nil
}

// Gone reports whether an observation lists neither workloads nor storage of the workspace on the node.
func Gone(o *nodev1.Observation) bool {
	return len(o.GetWorkloads()) == 0 && len(o.GetStorage().GetNames()) == 0
}
