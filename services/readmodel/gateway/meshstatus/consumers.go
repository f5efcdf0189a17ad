package meshstatus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/gateway/caller"
)

// eventConsumer is a row of mesh.event_consumers.
type eventConsumer struct {
	Service  string    `db:"service"`
	Name     string    `db:"name"`
	Pos      int64     `db:"pos"`
	Behind   int64     `db:"behind" expr:"greatest(coalesce((SELECT max(n.last_pos) FROM events.numbered n), 0) - @.pos, 0)"`
	MovedAt  time.Time `db:"moved_at"`
	Parked   int64     `db:"parked"`
	Replicas int64     `db:"replicas"`
	Silent   int64     `db:"silent"`
}

func (c eventConsumer) id() string { return c.Service + "/" + c.Name }

func (c eventConsumer) proto() *readmodelv1.EventConsumer {
	out := &readmodelv1.EventConsumer{
		Consumer: c.id(), Position: c.Pos, Behind: c.Behind, Parked: c.Parked, Replicas: c.Replicas,
		UnknownReplicas: c.Silent,
	}
	if !c.MovedAt.IsZero() { // zero: only its parked events are left
		out.MovedAt = timestamppb.New(c.MovedAt)
	}
	return out
}

// gone reports whether no live replica runs the consumer or could be running it.
func (c eventConsumer) gone() bool { return c.Replicas == 0 && c.Silent == 0 }

var (
	listConsumers = pg.Define(pg.RoleReadmodel, "status.list_consumers", `
		SELECT `+pg.Columns[eventConsumer]("c")+` FROM mesh.event_consumers(make_interval(secs => $1)) c
			ORDER BY c.service, c.name`)
	forgetConsumer = pg.Define(pg.RoleReadmodel, "status.forget_consumer", `
		SELECT `+pg.Columns[forgotten]("f")+`
		FROM mesh.forget_event_consumer($1, $2, make_interval(secs => $3), make_interval(secs => $4), $5) f`)
)

// forgotten is the result of mesh.forget_event_consumer.
type forgotten struct {
	Was   bool  `db:"was"`   // the cursor was there
	Taken int64 `db:"taken"` // parked events
	More  bool  `db:"more"`  // parked events are left
}

// parkedTogether is how many parked events one call deletes at most.
const parkedTogether = 10000

func readConsumers(ctx context.Context, q pg.Querier) ([]eventConsumer, error) {
	list, err := pg.All[eventConsumer](ctx, q, listConsumers, keyset.LiveFor.Seconds())
	if err != nil {
		return nil, fmt.Errorf("list consumers of events: %w", err)
	}
	return list, nil
}

// ListConsumers lists the consumers of events of all services.
func (e *Events) ListConsumers(ctx context.Context,
	_ *readmodelv1.ListConsumersRequest,
) (*readmodelv1.ListConsumersResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	list, err := readConsumers(ctx, e.db)
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.ListConsumersResponse{}
	for _, c := range list {
		out.Items = append(out.Items, c.proto())
	}
	return out, nil
}

// ForgetConsumer deletes the cursor of a consumer that no live replica runs, and its parked events or a part of them.
// To forget a consumer that does not exist changes nothing. In rollback mode it is refused: services may not all run
// yet, and a consumer that the restored database has may be of one of them.
func (e *Events) ForgetConsumer(ctx context.Context,
	req *readmodelv1.ForgetConsumerRequest,
) (*readmodelv1.ForgetConsumerResponse, error) {
	if err := caller.OperatorsOnly(ctx); err != nil {
		return nil, err
	}
	var out *readmodelv1.ForgetConsumerResponse
	err := pg.InTx(ctx, e.writes, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		out, err = forget(ctx, tx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	if out.GetConsumer() != nil && !req.GetDryRun() && e.wake != nil {
		e.wake.Notify()
	}
	return out, nil
}

func forget(ctx context.Context, tx pgx.Tx,
	req *readmodelv1.ForgetConsumerRequest,
) (*readmodelv1.ForgetConsumerResponse, error) {
	if err := notRolledBack(ctx, tx); err != nil {
		return nil, err
	}
	list, err := readConsumers(ctx, tx)
	if err != nil {
		return nil, err
	}
	// A consumer that is not listed may have been forgotten by a call that left parked events.
	var found eventConsumer
	found.Service, found.Name, _ = strings.Cut(req.GetConsumer(), "/")
	for _, c := range list {
		if c.id() == req.GetConsumer() {
			found = c
		}
	}
	most := parkedTogether
	if req.GetDryRun() {
		most = 0
	}
	did, err := pg.One[forgotten](ctx, tx, forgetConsumer, found.Service, found.Name, keyset.LiveFor.Seconds(),
		heldSince.Seconds(), most)
	switch {
	case failedAs(err, "55006"): // object_in_use
		return nil, inUse(found)
	case failedAs(err, "55000"): // object_not_in_prerequisite_state
		return nil, movedLately(found)
	case err != nil:
		return nil, fmt.Errorf("forget consumer %s: %w", found.id(), err)
	}
	if !did.Was && did.Taken == 0 && !did.More {
		return &readmodelv1.ForgetConsumerResponse{}, nil
	}
	if !did.Was {
		found.Parked = did.Taken
	}
	out := &readmodelv1.ForgetConsumerResponse{Consumer: found.proto(), ParkedLeft: did.More}
	if req.GetDryRun() {
		return out, nil
	}
	_, err = audit.Record(ctx, tx, audit.Entry{
		Action: "consumer.forget", Reason: req.GetReason(), SubjectType: "consumer", SubjectID: found.id(),
		Details: map[string]any{
			"position": found.Pos, "behind": found.Behind, "parked": found.Parked, "parked_taken": did.Taken,
			"moved_at": found.MovedAt,
		},
	})
	return out, err
}

// failedAs reports whether err is a database error with the SQLSTATE code.
func failedAs(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

func movedLately(c eventConsumer) error {
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		fmt.Sprintf("the consumer %s has read events within the last %.0f minutes: a replica that starts again may run it",
			c.id(), heldSince.Minutes()),
		fault.Unmet(fmt.Sprintf("the consumer has not moved for %.0f minutes", heldSince.Minutes())),
		fault.Remedy("ask again once it has stood still for that long"))
}

func inUse(c eventConsumer) error {
	if c.Replicas == 0 && c.Silent > 0 {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			fmt.Sprintf("%d live replicas of %s are of a build that does not say which consumers it runs", c.Silent, c.Service),
			fault.Remedy("update these replicas and ask again"))
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		"a live replica of "+c.Service+" runs the consumer "+c.id(),
		fault.Remedy("what it has not read it will read; if it is stuck, `gpuaas events parked "+c.id()+"` and the log of "+
			c.Service+" say why"))
}

// heldSince is how long the cursor of a consumer that no replica runs may stay where it is before the status lists it:
// a service that restarts is back by then.
const heldSince = 10 * time.Minute

// consumersComponent returns a component that names the consumers that no replica runs and that keep events from being
// cut, or nil if there are none.
func consumersComponent(list []eventConsumer, now time.Time) *readmodelv1.ComponentStatus {
	var held []string
	for _, c := range list {
		if c.gone() && c.Behind > 0 && now.Sub(c.MovedAt) > heldSince {
			held = append(held, c.id())
		}
	}
	if len(held) == 0 {
		return nil
	}
	c := component("event_consumers", false, "no live replica runs "+strings.Join(held, ", ")+
		", so that events behind the position of it are kept", now)
	c.Severity = commonv1.Severity_SEVERITY_P1
	c.NextAction = "start the service again; if no build that you run has this consumer any more: `gpuaas events forget " +
		held[0] + " --reason TEXT`"
	return c
}
