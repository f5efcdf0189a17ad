package actions

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
)

// Book has the open actions of some nodes in one transaction.
type Book struct {
	now    time.Time
	all    []*Action
	open   map[place]*Action // the last one of each place
	unread map[place]bool    // open ones of a newer build
}

// place is where at most one action is open.
type place struct{ nodeID, kind string }

// Beginning is what begins an action.
type Beginning struct {
	NodeID string // empty: the control plane
	Kind   Kind
	Reason commonv1.DriftReason // unspecified: none was concluded
	// Requester is Automatic, a service, or the person.
	Requester string
	// CorrelationID is that of the first rejection; empty: a new one is drawn.
	CorrelationID      string
	AgentCorrelationID string
	RejectedAt         time.Time     // the first time; zero: nothing was refused
	Within             time.Duration // until it fails; zero: by the budget of its kind
}

// Open locks the open actions of nodes. An empty id is the control plane's. The rows are the last that a transaction
// locks.
func Open(ctx context.Context, tx pgx.Tx, nodeIDs ...string) (*Book, error) {
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	return OpenAt(ctx, tx, now, nodeIDs...)
}

// OpenAt is Open for a transaction that has read the database's time.
func OpenAt(ctx context.Context, tx pgx.Tx, now time.Time, nodeIDs ...string) (*Book, error) {
	b := &Book{now: now, open: map[place]*Action{}, unread: map[place]bool{}}
	of := make([]string, len(nodeIDs))
	for i, id := range nodeIDs {
		of[i] = cmp.Or(id, ControlPlane)
	}
	rows, err := pg.All[row](ctx, tx, lockOpen, of)
	if err != nil {
		return nil, fmt.Errorf("lock recovery actions: %w", err)
	}
	for _, r := range rows {
		at := place{r.NodeID, r.Kind}
		a := &Action{row: r}
		var errReason error
		a.kind, err = names.Parse[Kind](r.Kind)
		a.reason, errReason = names.Parse[commonv1.DriftReason](r.Reason)
		if err = cmp.Or(err, errReason); err != nil {
			aside.Note(ctx, "recovery_action", r.ID, err)
			b.unread[at] = true
			continue
		}
		b.keep(a)
	}
	return b, nil
}

// keep adds an action that is locked or begun.
func (b *Book) keep(a *Action) {
	b.all, b.open[place{a.NodeID, a.row.Kind}] = append(b.all, a), a
}

// Now returns the database's time of the transaction.
func (b *Book) Now() time.Time { return b.now }

// Of returns the open action of a node and a kind; nil if there is none that this build knows.
func (b *Book) Of(nodeID string, kind Kind) *Action {
	if a := b.open[place{cmp.Or(nodeID, ControlPlane), names.Of(kind)}]; a != nil && a.Open() {
		return a
	}
	return nil
}

// kinds are all that this build knows, in their order.
var kinds = names.All[Kind]()

// OfNode returns the open actions of a node, in the order of their kinds.
func (b *Book) OfNode(nodeID string) []*Action {
	if len(b.open) == 0 {
		return nil
	}
	var out []*Action
	for _, kind := range kinds {
		if a := b.Of(nodeID, kind); a != nil {
			out = append(out, a)
		}
	}
	return out
}

// Begin begins an action, or joins the open one of the node and kind. It returns nil if that is one that only a newer
// build knows. Enrolling a node with a person's token goes on under the correlation id of what was done for it before,
// from its first rejection.
func (b *Book) Begin(from Beginning) *Action {
	nodeID := cmp.Or(from.NodeID, ControlPlane)
	at := place{nodeID, names.Of(from.Kind)}
	if a := b.Of(nodeID, from.Kind); a != nil {
		a.Rejected(from.RejectedAt)
		if until := b.now.Add(from.Within); a.kind == Bundle && until.After(a.FailsAt) {
			a.FailsAt, a.changed = until, true // a later bundle, whose token ends later
		}
		if a.reason == 0 && from.Reason != 0 {
			a.reason, a.row.Reason, a.changed = from.Reason, names.Of(from.Reason), true
		}
		if a.AgentCorrelationID == "" && from.AgentCorrelationID != "" && from.AgentCorrelationID != a.CorrelationID {
			a.AgentCorrelationID, a.changed = from.AgentCorrelationID, true
		}
		return a
	}
	if b.unread[at] {
		return nil
	}
	a := &Action{kind: from.Kind, reason: from.Reason, added: true, changed: true, within: from.Within, row: row{
		ID: ids.New(), NodeID: nodeID, Kind: at.kind, State: names.Of(StateOpen), Reason: names.Of(from.Reason),
		Requester: from.Requester, CorrelationID: from.CorrelationID, BegunAt: b.now,
	}}
	if !from.RejectedAt.IsZero() {
		a.FirstRejectedAt = &from.RejectedAt
	}
	if byPerson(from.Kind) {
		for _, old := range b.before(a) {
			a.follow(old)
		}
	}
	a.CorrelationID = cmp.Or(a.CorrelationID, from.AgentCorrelationID, ids.New())
	if from.AgentCorrelationID != a.CorrelationID {
		a.AgentCorrelationID = from.AgentCorrelationID
	}
	b.keep(a)
	return a
}

// byPerson reports whether an action of a kind enrols a node with a person's token.
func byPerson(kind Kind) bool { return kind == Bundle || kind == Rebootstrap }

// before returns the open actions of a node whose place an action with a person's token takes once that is used.
func (b *Book) before(a *Action) []*Action {
	return slices.DeleteFunc(b.OfNode(a.NodeID), func(old *Action) bool { return old == a || old.kind == StaleTaskSweep })
}

// follow has an action go on under the correlation id of one before, from its first rejection.
func (a *Action) follow(old *Action) {
	earlier := old.FirstRejectedAt != nil &&
		(a.FirstRejectedAt == nil || old.FirstRejectedAt.Before(*a.FirstRejectedAt))
	if a.added || earlier {
		a.CorrelationID, a.changed = cmp.Or(old.CorrelationID, a.CorrelationID), true
	}
	if earlier {
		a.FirstRejectedAt = old.FirstRejectedAt
	}
	if a.reason == 0 {
		a.reason, a.row.Reason = old.reason, old.row.Reason
	}
}

// replace ends what an action takes the place of, as the token that a person gave for it is used.
func (b *Book) replace(a *Action) {
	for _, old := range b.before(a) {
		a.follow(old)
		old.Supersede(b.now, names.Of(a.kind)+" by "+a.Requester)
	}
}

// errBegun has pg.InTx run the transaction again: another one has begun the same action, which is joined then.
var errBegun = &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "another transaction began the same action"}

// Save writes the actions that were begun or have changed, and appends their events.
func (b *Book) Save(ctx context.Context, tx pgx.Tx) error {
	var changed []*Action
	for _, a := range b.all {
		if a.changed {
			changed = append(changed, a)
		}
	}
	if len(changed) == 0 {
		return nil
	}
	if err := b.setEnds(ctx, tx); err != nil {
		return err
	}
	slices.SortFunc(changed, func(x, y *Action) int {
		return cmp.Or(cmp.Compare(x.NodeID, y.NodeID), cmp.Compare(x.row.Kind, y.row.Kind))
	})
	var added, updated []*Action
	list := make([]events.Event, 0, len(changed))
	for _, a := range changed {
		a.Version++
		e, err := a.event()
		if err != nil {
			return fmt.Errorf("write recovery action: %w", err)
		}
		list = append(list, e)
		if a.added {
			added = append(added, a)
		} else {
			updated = append(updated, a)
		}
	}
	// Those that end go first: they may leave their places to others.
	if len(updated) > 0 {
		if err := pg.Queue(ctx, tx, updateActions, columnsOf(updated)...); err != nil {
			return fmt.Errorf("write recovery actions: %w", err)
		}
	}
	if len(added) > 0 {
		tag, err := pg.Exec(ctx, tx, insertActions, columnsOf(added)...)
		if err != nil {
			return fmt.Errorf("begin recovery actions: %w", err)
		}
		if tag.RowsAffected() != int64(len(added)) {
			return fmt.Errorf("begin recovery actions: %w", errBegun)
		}
	}
	if _, err := events.Append(ctx, tx, list...); err != nil {
		return err
	}
	for _, a := range changed {
		a.added, a.changed = false, false
	}
	return nil
}

// setEnds sets when the actions fail that were begun, or whose budget begins anew.
func (b *Book) setEnds(ctx context.Context, tx pgx.Tx) error {
	var set policy.Set
	loaded := false
	for _, a := range b.all {
		if !a.added && !a.longer {
			continue
		}
		if a.within == 0 && !loaded {
			values, err := policystore.Load(tx)(ctx)
			if err != nil {
				return err
			}
			set, _ = policy.NewSet(values) // a value out of its bounds counts as its default, as it does everywhere
			loaded = true
		}
		if a.within == 0 {
			a.within = budgetOf(a.kind, set)
		}
		if until := b.now.Add(a.within); a.added || until.After(a.FailsAt) {
			a.FailsAt = until
		}
		a.longer = false
	}
	return nil
}

// drills name the row of the failure matrix in whose recovery budget each kind has to come to its end.
var drills = map[Kind]string{
	ReEnrolment:    "long-node-outage",
	Bundle:         "recovery-token-missing",
	CARepair:       "ingress-trust-drift",
	Rebootstrap:    "recovery-token-missing",
	Fencing:        "cloned-identity",
	StaleTaskSweep: "task-backlog-stale",
}

// budgetOf returns the time in which an action of a kind has to come to its end under a policy.
func budgetOf(kind Kind, set policy.Set) time.Duration {
	budget, _ := policy.BudgetOf(drills[kind])
	return budget.RecoverUnder(set)
}
