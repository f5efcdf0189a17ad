// Package work carries leased tasks from lifecycle to the sessions of this replica, and reports back. It owns no task.
// A hint that is lost costs a second, since lifecycle repeats the whole list; a report that is lost is sent again by
// the agent until it is acknowledged by name.
package work

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/nodeapi/authority"
	"github.com/gpuaas/mesh/services/nodeapi/reconnect"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
)

// Lifecycle is where work comes from.
type Lifecycle interface {
	LeaseTasks(context.Context, *lifecyclev1.LeaseTasksRequest) (*lifecyclev1.LeaseTasksResponse, error)
	ReportTasks(context.Context, *lifecyclev1.ReportTasksRequest) (*lifecyclev1.ReportTasksResponse, error)
}

// Hints is the stream of WatchWork.
type Hints interface {
	Receive() bool
	Msg() *lifecyclev1.WatchWorkResponse
	Err() error
	Close() error
}

// Metrics of the work.
type Metrics interface {
	Offered(n int)
	Acknowledged(n int)
}

const (
	leaseNodes   = 64 // nodes in one lease
	leasePerNode = 16 // tasks of one node in one lease
	leaseLanes   = 2  // leases under way at once

	// spacing is the least time between the starts of two leases, or of two reports. Requests that come meanwhile join the
	// next one, so that a storm costs few transactions.
	spacing = 2 * time.Millisecond
)

// Dispatcher leases work for the sessions that stand here and offers it.
type Dispatcher struct {
	replicaID string
	logger    *slog.Logger
	roster    *roster.Roster
	view      *authority.View
	marks     *Marks
	offers    *Offers
	lifecycle Lifecycle
	watch     func(ctx context.Context, replicaID string) (Hints, error)
}

// NewDispatcher makes a dispatcher, which leases for the nodes in marks and passes what it leased to offers.
func NewDispatcher(logger *slog.Logger, replicaID string, r *roster.Roster, v *authority.View, marks *Marks,
	offers *Offers, lc Lifecycle, watch func(ctx context.Context, replicaID string) (Hints, error),
) *Dispatcher {
	return &Dispatcher{
		replicaID: replicaID, logger: logger, roster: r, view: v, marks: marks, offers: offers, lifecycle: lc, watch: watch,
	}
}

// Watch follows lifecycle's hints until ctx ends.
func (d *Dispatcher) Watch(ctx context.Context) error {
	return reconnect.Keep(ctx, d.watchOnce, func(failures int, err error) {
		d.logger.WarnContext(ctx, "work watch lost", slog.Int("failures", failures), slog.Any("error", err))
	})
}

func (d *Dispatcher) watchOnce(ctx context.Context) error {
	hints, err := d.watch(ctx, d.replicaID)
	if err != nil {
		return fmt.Errorf("watch work: %w", err)
	}
	defer func() { _ = hints.Close() }()
	for hints.Receive() {
		msg := hints.Msg()
		d.marks.Mark(msg.GetNodeIds()...)
		d.cancel(msg.GetCancels())
	}
	if err := hints.Err(); err != nil {
		return fmt.Errorf("receive work: %w", err)
	}
	return nil
}

// mostCancels bounds the frames with cancels that one list of hints sends to a session. Lifecycle repeats the ones left
// out within a second.
const mostCancels = 64

// cancel asks agents to stop tasks. The tasks of one node with one reason go together.
func (d *Dispatcher) cancel(hints []*lifecyclev1.TaskCancelHint) {
	type group struct {
		node, reason string
		epoch        int64
	}
	refs := map[group][]*nodev1.TaskRef{}
	var order []group
	for _, c := range hints {
		g := group{c.GetNodeId(), c.GetReason(), c.GetEpoch()}
		if refs[g] == nil {
			order = append(order, g)
		}
		refs[g] = append(refs[g], c.GetTask())
	}
	sent := map[string]int{}
	for _, g := range order {
		s := d.roster.Current(g.node)
		if s == nil {
			continue
		}
		for _, f := range s.Cancels(refs[g], g.epoch, g.reason) {
			if sent[g.node]++; sent[g.node] > mostCancels {
				break
			}
			s.Send(f)
		}
	}
}

// Run leases and offers until ctx ends.
func (d *Dispatcher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	lanes := make(chan struct{}, leaseLanes)
	var pace pacer
	for {
		select {
		case <-d.marks.wake:
		case <-ctx.Done():
			return nil
		}
		if d.view.WaitFresh(ctx) != nil {
			return nil
		}
		for {
			select {
			case lanes <- struct{}{}:
			case <-ctx.Done():
				return nil
			}
			if !pace.wait(ctx) {
				return nil
			}
			sessions := d.take()
			if len(sessions) == 0 {
				<-lanes
				break
			}
			pace.begun()
			wg.Go(func() {
				defer func() { <-lanes }()
				d.lease(ctx, sessions)
			})
		}
	}
}

// take returns the sessions of marked nodes that may be given work, at most as many as one lease takes.
func (d *Dispatcher) take() []*roster.Session {
	var out []*roster.Session
	d.marks.take(func(n string) bool {
		s := d.roster.Current(n)
		if s != nil && s.MayLease() && d.view.MayDispatch(n, s.ID, s.Generation()) {
			out = append(out, s)
		}
		return len(out) < leaseNodes
	})
	return out
}

func (d *Dispatcher) lease(ctx context.Context, sessions []*roster.Session) {
	req := &lifecyclev1.LeaseTasksRequest{ReplicaId: d.replicaID, Standing: true}
	byID := make(map[string]*roster.Session, len(sessions))
	for _, s := range sessions {
		byID[s.ID] = s
		req.Nodes = append(req.Nodes, &lifecyclev1.NodeLease{
			NodeId: s.Identity.NodeID, SessionId: s.ID,
			Generation: s.Generation(), MaxTasks: leasePerNode,
		})
	}
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	res, err := d.lifecycle.LeaseTasks(call, req)
	if err != nil {
		// Lifecycle's sweep names these nodes again within a second. Asking again at once would load a service that is in
		// trouble.
		if ctx.Err() == nil {
			d.logger.WarnContext(ctx, "lease refused", slog.Int("nodes", len(sessions)), slog.Any("error", err))
		}
		return
	}
	if failpoint.Hit("nodeapi.lease.before_offer") != nil {
		return
	}
	for _, t := range res.GetTasks() {
		// A task that is leased and not offered is leased again after two seconds.
		if s := byID[t.GetSessionId()]; s != nil {
			d.offers.offer(s, t)
		}
	}
	for _, r := range res.GetRefused() {
		if r.GetDenial().GetAction() != commonv1.Action_ACTION_WAIT {
			d.logger.InfoContext(ctx, "gate refused a lease", slog.String("node_id", r.GetNodeId()),
				slog.Any("error", fault.FromDenial(r.GetDenial())))
		}
	}
	d.marks.Mark(res.GetMore()...)
}

// pacer keeps the starts of batches apart by spacing.
type pacer struct{ last time.Time }

// wait waits until the next batch may start. It returns false if ctx ended first.
func (p *pacer) wait(ctx context.Context) bool {
	pause := spacing - time.Since(p.last)
	if pause <= 0 {
		return true
	}
	select {
	case <-time.After(pause):
		return true
	case <-ctx.Done():
		return false
	}
}

func (p *pacer) begun() { p.last = time.Now() }
