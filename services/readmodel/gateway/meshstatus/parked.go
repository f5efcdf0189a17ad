package meshstatus

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// parkedEvent is a row of mesh.parked_events.
type parkedEvent struct {
	Service  string     `db:"service"`
	Consumer string     `db:"consumer"`
	Pos      int64      `db:"pos"`
	EventID  string     `db:"event_id" expr:"coalesce(@.event_id::text, '')"`
	Kind     string     `db:"kind"`
	Error    string     `db:"error"`
	Attempts int32      `db:"attempts"`
	ParkedAt time.Time  `db:"parked_at"`
	AskedAt  *time.Time `db:"asked_at"`
}

func (p parkedEvent) proto() *readmodelv1.ParkedEvent {
	out := &readmodelv1.ParkedEvent{
		Consumer: p.Service + "/" + p.Consumer, Position: p.Pos, EventId: p.EventID, Kind: p.Kind, Error: p.Error,
		Attempts: p.Attempts, ParkedAt: timestamppb.New(p.ParkedAt),
	}
	if p.AskedAt != nil {
		out.AskedAt = timestamppb.New(*p.AskedAt)
	}
	return out
}

var (
	listParked = pg.Define(pg.RoleReadmodel, "status.list_parked", `
		SELECT `+pg.Columns[parkedEvent]("p")+` FROM mesh.parked_events($1, $2, $3, $4, $5, $6) p`)
	replayParked = pg.Define(pg.RoleReadmodel, "status.replay_parked", `
		SELECT mesh.replay_parked_events($1, $2, $3, $4)`)
	dropParked = pg.Define(pg.RoleReadmodel, "status.drop_parked", `
		SELECT `+pg.Columns[parkedEvent]("p")+` FROM mesh.drop_parked_event($1, $2, $3) p`)
)

// parkedOfPage is how many parked events a page has unless the request has a size.
const parkedOfPage = 100

// ListParked lists the parked events of all services, or of one consumer.
func (e *Events) ListParked(ctx context.Context, req *readmodelv1.ListParkedRequest) (*readmodelv1.ListParkedResponse,
	error,
) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	after, err := parkedToken(req.GetPageToken())
	if err != nil {
		return nil, err
	}
	size := int(req.GetPageSize())
	if size == 0 {
		size = parkedOfPage
	}
	service, name, _ := strings.Cut(req.GetConsumer(), "/")
	if after.Service == "" {
		after.Service, after.Consumer = service, name
	}
	list, err := pg.All[parkedEvent](ctx, e.db, listParked, service, name, after.Service, after.Consumer, after.Pos,
		size+1)
	if err != nil {
		return nil, fmt.Errorf("list parked events: %w", err)
	}
	out := &readmodelv1.ListParkedResponse{}
	for i, p := range list {
		if i == size {
			last := out.GetItems()[size-1]
			out.NextPageToken = strconv.FormatInt(last.GetPosition(), 10) + ":" + last.GetConsumer()
			break
		}
		out.Items = append(out.Items, p.proto())
	}
	return out, nil
}

// parkedToken reads a page token, POSITION:SERVICE/NAME of the last event that was listed.
func parkedToken(token string) (parkedEvent, error) {
	if token == "" {
		return parkedEvent{}, nil
	}
	pos, id, _ := strings.Cut(token, ":")
	service, name, found := strings.Cut(id, "/")
	at, err := strconv.ParseInt(pos, 10, 64)
	if err != nil || !found || at < 0 {
		return parkedEvent{}, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
			fault.Unmet("page_token: not from this list"), fault.Cause(err))
	}
	return parkedEvent{Service: service, Consumer: name, Pos: at}, nil
}

// ReplayParked has a consumer apply again what it has parked, with its next batch. A consumer that no live replica runs
// would never do it, so that is refused.
func (e *Events) ReplayParked(ctx context.Context,
	req *readmodelv1.ReplayParkedRequest,
) (*readmodelv1.ReplayParkedResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	out := &readmodelv1.ReplayParkedResponse{}
	err := pg.InTx(ctx, e.writes, func(ctx context.Context, tx pgx.Tx) error {
		if err := e.mayReplay(ctx, tx, req); err != nil {
			return err
		}
		service, name, _ := strings.Cut(req.GetConsumer(), "/")
		var err error
		out.Asked, err = pg.Value[int64](ctx, tx, replayParked, service, name, req.GetPosition(), parkedTogether)
		if err != nil {
			return fmt.Errorf("have %s apply parked events again: %w", req.GetConsumer(), err)
		}
		if out.GetAsked() == 0 {
			return nil // each had been asked for before
		}
		// The entry is an event, and so brings the consumer's next batch about.
		_, err = audit.Record(ctx, tx, audit.Entry{
			Action: "parked_event.replay", Reason: req.GetReason(), SubjectType: "consumer", SubjectID: req.GetConsumer(),
			Details: map[string]any{"position": req.GetPosition(), "asked": out.GetAsked()},
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	if out.GetAsked() > 0 && e.wake != nil {
		e.wake.Notify()
	}
	return out, nil
}

// mayReplay refuses a replay that no consumer would carry out.
func (e *Events) mayReplay(ctx context.Context, tx pgx.Tx, req *readmodelv1.ReplayParkedRequest) error {
	if err := notRolledBack(ctx, tx); err != nil {
		return err
	}
	if _, err := oneParked(ctx, tx, req.GetConsumer(), req.GetPosition()); err != nil {
		return err
	}
	list, err := readConsumers(ctx, tx)
	if err != nil {
		return err
	}
	for _, c := range list {
		if c.id() == req.GetConsumer() && !c.gone() {
			return nil
		}
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "no live replica runs the consumer "+req.GetConsumer(),
		fault.Remedy("start its service again; if no build that you run has this consumer any more: `gpuaas events forget "+
			req.GetConsumer()+" --reason TEXT`"))
}

// DropParked has a consumer pass a parked event over for good: it is taken off the list, and is no longer kept for it.
func (e *Events) DropParked(ctx context.Context, req *readmodelv1.DropParkedRequest) (*readmodelv1.DropParkedResponse,
	error,
) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	var event parkedEvent
	err := pg.InTx(ctx, e.writes, func(ctx context.Context, tx pgx.Tx) error {
		err := notRolledBack(ctx, tx)
		if err != nil {
			return err
		}
		if event, err = oneParked(ctx, tx, req.GetConsumer(), req.GetPosition()); err != nil || req.GetDryRun() {
			return err
		}
		event, err = pg.One[parkedEvent](ctx, tx, dropParked, event.Service, event.Consumer, event.Pos)
		if pg.IsNoRows(err) {
			return notParked(req.GetConsumer(), req.GetPosition()) // applied at this moment
		}
		if err != nil {
			return fmt.Errorf("drop parked event: %w", err)
		}
		_, err = audit.Record(ctx, tx, audit.Entry{
			Action: "parked_event.drop", Reason: req.GetReason(), SubjectType: "consumer", SubjectID: req.GetConsumer(),
			Details: map[string]any{
				"position": event.Pos, "event_id": event.EventID, "kind": event.Kind, "error": event.Error,
				"attempts": event.Attempts,
			},
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	if !req.GetDryRun() && e.wake != nil {
		e.wake.Notify()
	}
	return &readmodelv1.DropParkedResponse{Event: event.proto()}, nil
}

func notRolledBack(ctx context.Context, tx pgx.Tx) error {
	active, err := view.RolledBack(ctx, tx)
	if err == nil && active {
		err = fault.New(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK, "")
	}
	return err
}

// oneParked returns the event that a consumer has parked at a position, or the first one (0).
func oneParked(ctx context.Context, tx pgx.Tx, consumer string, pos int64) (parkedEvent, error) {
	service, name, _ := strings.Cut(consumer, "/")
	list, err := pg.All[parkedEvent](ctx, tx, listParked, service, name, service, name, max(pos-1, 0), 1)
	if err != nil {
		return parkedEvent{}, fmt.Errorf("read parked event: %w", err)
	}
	if len(list) == 0 || pos > 0 && list[0].Pos != pos {
		return parkedEvent{}, notParked(consumer, pos)
	}
	return list[0], nil
}

func notParked(consumer string, pos int64) error {
	what := consumer + " has parked no event"
	if pos > 0 {
		what = fmt.Sprintf("%s at position %d", what, pos)
	}
	return fault.New(commonv1.Reason_REASON_NOT_FOUND, what,
		fault.Remedy("`gpuaas events parked` lists what is parked; an event that was applied meanwhile is not listed any "+
			"more"))
}

// parkedComponent returns a component that names the consumers that have parked events, or nil if none has. What is
// left of a consumer that was forgotten is listed with the other parked events, and not counted here.
func parkedComponent(list []eventConsumer, now time.Time) *readmodelv1.ComponentStatus {
	var of []string
	var events int64
	for _, c := range list {
		if c.Parked > 0 {
			of = append(of, c.id())
			events += c.Parked
		}
	}
	if len(of) == 0 {
		return nil
	}
	c := component("parked_events", false, fmt.Sprintf("%d events could not be applied by %s, which went on without them",
		events, strings.Join(of, ", ")), now)
	c.Severity = commonv1.Severity_SEVERITY_P2
	c.NextAction = "`gpuaas events parked` shows each with its error; when that is repaired, as by an update: `gpuaas " +
		"events replay " + of[0] + " --all --reason TEXT`; they are kept, and the log with them, until they are replayed " +
		"or dropped"
	return c
}
