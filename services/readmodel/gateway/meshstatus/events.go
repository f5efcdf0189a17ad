package meshstatus

import (
	"context"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
)

// Events serves EventService. It reads the event log, not the projections.
type Events struct {
	db     pg.Querier
	writes pg.Beginner
	wake   *events.Signal
}

// NewEvents returns the server. db and writes log in as readmodel; wake is notified of appended events, and may be nil.
func NewEvents(db pg.Querier, writes pg.Beginner, wake *events.Signal) *Events {
	return &Events{db: db, writes: writes, wake: wake}
}

// A request reads at most eventRounds times eventsRead events, whatever its filter.
const (
	eventsRead   = 500
	eventRounds  = 8
	eventsOfPage = 100 // unless the request has a size
)

// ListEvents lists the events from a position on, or the one at a position. It is for operators, because a message may
// have fields that people of one tenant alone may see.
func (e *Events) ListEvents(ctx context.Context, req *readmodelv1.ListEventsRequest) (*readmodelv1.ListEventsResponse,
	error,
) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	if at := req.GetPosition(); at > 0 {
		if req.GetSince() > 0 || req.GetKind() != "" || req.GetPageToken() != "" {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "an event is asked for by its position alone",
				fault.Unmet("position: it goes without since, kind and page_token"))
		}
		return e.at(ctx, at)
	}
	after := max(req.GetSince()-1, 0)
	if token := req.GetPageToken(); token != "" {
		read, err := strconv.ParseInt(token, 10, 64)
		if err != nil || read < 0 {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
				fault.Unmet("page_token: not from this list"), fault.Cause(err))
		}
		after = max(after, read)
	}
	size := int(req.GetPageSize())
	if size == 0 {
		size = eventsOfPage
	}
	return e.list(ctx, after, req.GetKind(), size)
}

// at returns the event at a position.
func (e *Events) at(ctx context.Context, pos int64) (*readmodelv1.ListEventsResponse, error) {
	r, err := events.At(ctx, e.db, pos)
	if pg.IsNoRows(err) {
		return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("there is no event at position %d", pos),
			fault.Remedy("`gpuaas events show --since N` lists those that are there; what every service has read goes at "+
				"its term"))
	}
	if err != nil {
		return nil, err
	}
	row, err := eventRow(&r)
	if err != nil {
		return nil, err
	}
	return &readmodelv1.ListEventsResponse{Items: []*readmodelv1.EventRow{row}}, nil
}

// list returns events after a position, at most size, and where to read on.
func (e *Events) list(ctx context.Context, after int64, kind string, size int) (*readmodelv1.ListEventsResponse,
	error,
) {
	out := &readmodelv1.ListEventsResponse{}
	for range eventRounds {
		most := eventsRead
		if kind == "" {
			most = min(size-len(out.GetItems()), most)
		}
		records, end, err := events.Read(ctx, e.db, after, nil, most)
		if err != nil {
			return nil, err
		}
		for i := range records {
			if kind != "" && records[i].Kind != kind {
				continue
			}
			row, err := eventRow(&records[i])
			if err != nil {
				return nil, err
			}
			out.Items = append(out.GetItems(), row)
			if len(out.GetItems()) == size {
				out.NextPageToken = strconv.FormatInt(records[i].Pos, 10)
				return out, nil
			}
		}
		if len(records) < most {
			return out, nil
		}
		after = end
	}
	out.NextPageToken = strconv.FormatInt(after, 10)
	return out, nil
}

// eventRow returns an event in the form of the API. Events that earlier builds stored as JSON may have the values of
// environments, which the API never returns, so they are withheld; the entries of the audit log, which are still stored
// as JSON, have none.
func eventRow(r *events.Record) (*readmodelv1.EventRow, error) {
	row := &readmodelv1.EventRow{
		Position: r.Pos, EventId: r.ID, Source: r.Source, Kind: r.Kind, AggregateType: r.AggregateType,
		AggregateId: r.AggregateID, AggregateVersion: r.AggregateVersion, At: timestamppb.New(r.CreatedAt),
		CorrelationId: r.CorrelationID, TenantId: r.TenantID, WorkspaceId: r.WorkspaceID, WorkflowId: r.WorkflowID,
		AllocationId: r.AllocationID, TaskId: r.TaskID, NodeId: r.NodeID, NodeInstanceId: r.NodeInstanceID,
		Message: r.BodyType,
	}
	if r.Stored != nil && r.Kind != audit.Kind {
		row.Withheld = "an earlier build has stored it as JSON, which may have values of environments"
		return row, nil
	}
	raw, err := r.Payload()
	if err != nil {
		row.Withheld = "this build cannot read it"
		return row, nil //nolint:nilerr // one that cannot be read hides no others
	}
	row.Body = &structpb.Struct{}
	if err := protojson.Unmarshal(raw, row.GetBody()); err != nil {
		return nil, fmt.Errorf("show event at %d: %w", r.Pos, err)
	}
	return row, nil
}
