package diagnostics

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// Deps are the dependencies of a Server.
type Deps struct {
	Logger *slog.Logger
	Pool   *pgxpool.Pool
	Wake   *events.Signal // notified after commits that appended events
	Audit  *audit.Log     // records refusals; nil: none are recorded
	// Fresh is how long a record explains anything; more than a day is a day.
	Fresh time.Duration
	// Merged is called after the commit of a record that has changed evidence; nil: it is not.
	Merged func()
	// Registerer registers the server's metrics; nil: they are not registered.
	Registerer prometheus.Registerer
}

// Server implements DiagnosticsService. It is safe for concurrent use.
type Server struct {
	deps Deps
	left *prometheus.CounterVec // entries that were not kept
}

// New checks the dependencies.
func New(deps Deps) (*Server, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Fresh <= 0 {
		return nil, errors.New("diagnostics server needs a logger, a pool and how long a record explains anything")
	}
	s := &Server{deps: deps, left: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "recovery_diagnostics_refused_total",
		Help: "Entries of diagnostic records that people brought and that were not kept, by cause: unknown_code, or " +
			"out_of_time (too long ago, without a time, or with one that cannot be read).",
	}, []string{"cause"})}
	for _, cause := range []string{causeUnknown, causeTime} {
		s.left.WithLabelValues(cause) // shown as zero before the first
	}
	if deps.Registerer != nil {
		if err := deps.Registerer.Register(s.left); err != nil {
			return nil, fmt.Errorf("register metrics of diagnostics: %w", err)
		}
	}
	return s, nil
}

// Causes for which an entry of a record is not kept.
const (
	causeUnknown = "unknown_code"
	causeTime    = "out_of_time"
)

var (
	readDigest = pg.Define(pg.RoleRecovery, "diagnostics.read_digest", `
		SELECT r.digest FROM recovery.host_record r WHERE r.node_id = $1`)

	writeRecord = pg.Define(pg.RoleRecovery, "diagnostics.write_record", `
		INSERT INTO recovery.host_record AS r (node_id, digest, brought_by, brought_at, version)
		VALUES ($1, $2, $3, $4, 1)
		ON CONFLICT (node_id) DO UPDATE SET digest = EXCLUDED.digest, brought_by = EXCLUDED.brought_by,
			brought_at = EXCLUDED.brought_at, version = r.version + 1
		RETURNING version`)
)

// MergeDiagnostics keeps the record of a host as evidence, with who brought it.
func (s *Server) MergeDiagnostics(
	ctx context.Context, req *recoveryv1.MergeDiagnosticsRequest,
) (*recoveryv1.MergeDiagnosticsResponse, error) {
	by := rpc.ActorFrom(ctx)
	records, unknown := s.read(req.GetRecords(), by)
	digest, err := digestOf(req.GetRecords())
	if err != nil {
		return nil, err
	}
	out := &recoveryv1.MergeDiagnosticsResponse{}
	err = pg.InTx(ctx, s.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		out = &recoveryv1.MergeDiagnosticsResponse{UnknownCodes: unknown}
		changed, now, err := collect.MergeHost(ctx, tx, req.GetNodeId(), records, obs.From(ctx).CorrelationID)
		if err != nil {
			return err
		}
		codes := count(out, records, now)
		before, err := pg.Values[[]byte](ctx, tx, readDigest, req.GetNodeId())
		if err != nil {
			return fmt.Errorf("read record of host: %w", err)
		}
		if len(before) > 0 && bytes.Equal(before[0], digest) && !changed {
			return nil
		}
		out.Changed = true
		version, err := pg.Value[int64](ctx, tx, writeRecord, req.GetNodeId(), digest, by, now)
		if err != nil {
			return fmt.Errorf("write record of host: %w", err)
		}
		_, err = audit.Record(ctx, tx, audit.Entry{
			Action: "node.diagnostics", SubjectType: "node", SubjectID: req.GetNodeId(), NodeID: req.GetNodeId(),
			Details: map[string]any{
				"codes": codes, "explains": out.GetExplains(), "unknown_codes": out.GetUnknownCodes(),
				"out_of_time": out.GetOutOfTime(),
			},
		})
		if err != nil {
			return err
		}
		out.Pos, err = events.Append(ctx, tx, events.Event{
			Kind: "diagnostics.merged", AggregateType: "host_record", AggregateID: req.GetNodeId(), AggregateVersion: version,
			Payload: &recoveryv1.DiagnosticsMerged{
				NodeId: req.GetNodeId(), BroughtBy: by, BroughtAt: timestamppb.New(now), Codes: codes,
				Explains: out.GetExplains(), UnknownCodes: out.GetUnknownCodes(), OutOfTime: out.GetOutOfTime(), Version: version,
			},
			Correlation: events.Correlation{CorrelationID: obs.From(ctx).CorrelationID, NodeID: req.GetNodeId()},
		})
		return err
	})
	if err != nil {
		refused := audit.Entry{
			Action: "node.diagnostics", SubjectType: "node", SubjectID: req.GetNodeId(), NodeID: req.GetNodeId(),
		}
		return nil, fmt.Errorf("merge diagnostics: %w", s.deps.Audit.Refuse(ctx, refused, err))
	}
	s.left.WithLabelValues(causeUnknown).Add(float64(out.GetUnknownCodes()))
	s.left.WithLabelValues(causeTime).Add(float64(out.GetOutOfTime()))
	if out.GetChanged() {
		s.deps.Wake.Notify()
		if s.deps.Merged != nil {
			s.deps.Merged()
		}
	}
	return out, nil
}

// read returns the records of a request and how many have a code that this build does not know. Times that cannot be
// read are none.
func (s *Server) read(list []*recoveryv1.HostRecord, by string) ([]collect.HostRecord, int32) {
	unknown := int32(0)
	out := make([]collect.HostRecord, 0, len(list))
	for _, r := range list {
		code, err := names.Parse[commonv1.DiagnosticCode](r.GetCode())
		if err != nil || code == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_UNSPECIFIED {
			unknown++
			continue
		}
		out = append(out, collect.HostRecord{
			Code: code, Detail: r.GetDetail(), SeenAt: timeOf(r.GetLastSeenAt()),
			NextRetry: min(max(r.GetNextRetry().AsDuration(), 0), 24*time.Hour), EndedAt: timeOf(r.GetEndedAt()),
			CorrelationID: r.GetRetryCorrelationId(), By: by, Fresh: s.deps.Fresh,
		})
	}
	return out, unknown
}

func timeOf(at *timestamppb.Timestamp) time.Time {
	if at == nil || at.CheckValid() != nil {
		return time.Time{}
	}
	return at.AsTime()
}

// count notes in the answer what becomes of the records, and returns the codes of those that are kept.
func count(out *recoveryv1.MergeDiagnosticsResponse, records []collect.HostRecord, now time.Time) []string {
	codes := make([]string, 0, len(records))
	for i := range records {
		r := &records[i]
		if !r.InTime(now) {
			out.OutOfTime++
			continue
		}
		out.Taken++
		codes = append(codes, names.Of(r.Code))
		if reason, _, _ := drift.ExplainedBy(r.Code); reason != 0 && r.EndedAt.IsZero() {
			out.Explains = append(out.Explains, names.Of(reason))
		}
	}
	slices.Sort(codes)
	slices.Sort(out.GetExplains())
	out.Explains = slices.Compact(out.GetExplains())
	return slices.Compact(codes)
}

// digestOf returns the digest of a record, by which it is known when it is brought again.
func digestOf(list []*recoveryv1.HostRecord) ([]byte, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(&recoveryv1.MergeDiagnosticsRequest{Records: list})
	if err != nil {
		return nil, fmt.Errorf("digest of diagnostics: %w", err)
	}
	sum := sha256.Sum256(data)
	return sum[:], nil
}
