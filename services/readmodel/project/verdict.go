package project

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"time"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/readmodel/project/rowbody"
)

// ControlPlane stands for the id of a node in the row of the verdict about the control plane.
var ControlPlane = uuid.Nil.String()

// verdictRows returns the rows of a verdict's event: the verdict, the period that it ends, and the period that it
// begins or that goes on with it.
func verdictRows(r events.Record) ([]row, error) {
	m, body, err := rowbody.Of(r, &recoveryv1.NodeVerdict{})
	if err != nil {
		return nil, err
	}
	node := ControlPlane
	if m.GetNodeId() != "" {
		node = m.GetNodeId()
	}
	out, err := one(r, "verdict", []any{key(node), r.AggregateVersion, body})
	if err != nil {
		return nil, err
	}
	periods := []*recoveryv1.VerdictPeriod{m.GetEnded()}
	if m.GetReason() != commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
		periods = append(periods, &recoveryv1.VerdictPeriod{
			NodeId: m.GetNodeId(), Reason: m.GetReason(), Severity: m.GetSeverity(), ObservedAt: m.GetObservedAt(),
			DetectedAt: m.GetDetectedAt(), CorrelationId: m.GetCorrelationId(), Version: m.GetVersion(),
		})
	}
	for _, p := range periods {
		if p == nil {
			continue
		}
		if p.GetDetectedAt() == nil {
			return nil, errors.New("the period of a reason has no time of its detection")
		}
		rows, err := one(r, "verdict_period", []any{
			PeriodID(node, p.GetDetectedAt().AsTime()), r.AggregateVersion, key(node), &rowbody.Content{Message: p},
		})
		if err != nil {
			return nil, err
		}
		out = append(out, rows...)
	}
	return out, nil
}

// PeriodID returns the id of the period of a node's reason that was concluded at a time. It is the same whenever it is
// made, and the ids of later periods are larger: a UUIDv7 of the time in microseconds, with bits of a hash of the node
// in the place of random ones.
func PeriodID(nodeID string, detected time.Time) string {
	micros := uint64(max(0, detected.UnixMicro()))
	hash := sha256.Sum256([]byte(nodeID))
	var id uuid.UUID
	binary.BigEndian.PutUint64(id[:8], micros/1000<<16|7<<12|micros%1000)
	copy(id[8:], hash[:8])
	id[8] = id[8]&0x3f | 0x80
	return id.String()
}
