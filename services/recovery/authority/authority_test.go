package authority_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/authority"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// stream is the side of a replica of nodeapi, without a network.
type stream struct {
	in   chan *recoveryv1.WatchAuthorityRequest
	out  chan *recoveryv1.WatchAuthorityResponse
	done chan struct{}
}

func newStream() *stream {
	return &stream{
		in: make(chan *recoveryv1.WatchAuthorityRequest, 16), out: make(chan *recoveryv1.WatchAuthorityResponse),
		done: make(chan struct{}),
	}
}

func (s *stream) Receive() (*recoveryv1.WatchAuthorityRequest, error) {
	select {
	case f := <-s.in:
		return f, nil
	case <-s.done:
		return nil, io.EOF
	}
}

func (s *stream) Send(f *recoveryv1.WatchAuthorityResponse) error {
	select {
	case s.out <- f:
		return nil
	case <-s.done:
		return io.EOF
	}
}

func (s *stream) subscribe() {
	s.in <- &recoveryv1.WatchAuthorityRequest{Frame: &recoveryv1.WatchAuthorityRequest_Subscribe{
		Subscribe: &recoveryv1.AuthoritySubscribe{ReplicaId: ids.New()},
	}}
}

func (s *stream) ping(id int64) {
	s.in <- &recoveryv1.WatchAuthorityRequest{
		Frame: &recoveryv1.WatchAuthorityRequest_Ping{Ping: &recoveryv1.AuthorityPing{PingId: id}},
	}
}

type bench struct {
	t       *testing.T
	ctx     context.Context
	db      *testkit.Database
	pool    *pgxpool.Pool
	poller  *authority.Poller
	changed *events.Signal
	// numbered is the signal of a poller's process that listens; nil: it has none.
	numbered *events.Signal
	watches  sync.WaitGroup
}

// newBench makes a running poller over a database of its own, which before fills first.
func newBench(t *testing.T, cfg authority.Config, before ...func(*bench)) *bench {
	t.Helper()
	testkit.IO(t)
	b := &bench{t: t, db: testkit.DB(t), changed: &events.Signal{}}
	b.pool = b.db.Pool(pg.RoleRecovery)
	ctx, cancel := context.WithCancel(testkit.Context(t))
	b.ctx = ctx
	for _, fill := range before {
		fill(b)
	}
	var err error
	b.poller, err = authority.New(authority.Deps{
		Logger: testkit.Logger(t), Pool: b.pool, Changed: b.changed, Numbered: b.numbered,
	}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- b.poller.Run(ctx) }()
	t.Cleanup(func() {
		b.watches.Wait()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return b
}

// watch serves a stream until it is closed or dropped.
func (b *bench) watch() (*stream, chan error) {
	s := newStream()
	ended := make(chan error, 1)
	b.watches.Go(func() { ended <- b.poller.Watch(b.ctx, s) })
	b.t.Cleanup(func() {
		select {
		case <-s.done:
		default:
			close(s.done)
		}
	})
	s.subscribe()
	return s, ended
}

func (b *bench) next(s *stream) *recoveryv1.WatchAuthorityResponse {
	b.t.Helper()
	for {
		select {
		case f := <-s.out:
			if f.GetIssuers() == nil { // TestWatchersAreSentTheIssuers
				return f
			}
		case <-time.After(time.Minute):
			b.t.Fatal("no frame came")
			return nil
		}
	}
}

// change makes an active node, or changes it, and returns its authority number.
func (b *bench) change(nodeID, name string) int64 {
	b.t.Helper()
	var seq int64
	err := pg.InTx(b.ctx, b.pool, func(ctx context.Context, tx pgx.Tx) error {
		found, err := identity.Lock(ctx, tx, nodeID)
		if err != nil {
			return err
		}
		r := found[nodeID]
		if r == nil {
			r = &identity.Record{NodeID: nodeID, Name: name}
			_, err = identity.Insert(ctx, tx, r)
		} else {
			_, err = identity.Save(ctx, tx, r)
		}
		seq = r.AuthoritySeq
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return seq
}

func TestSnapshotThenDeltas(t *testing.T) {
	b := newBench(t, authority.Config{Poll: time.Hour})
	var last int64
	nodes := map[string]bool{}
	for i := range 1203 {
		id := ids.New()
		nodes[id] = true
		last = b.change(id, fmt.Sprintf("node-%d", i))
	}
	b.changed.Notify()
	s, _ := b.watch()
	parts := 0
	for {
		f := b.next(s)
		if end := f.GetSnapshotEnd(); end != nil {
			if end.GetSequence() != last {
				t.Fatalf("snapshot ends at %d, want %d", end.GetSequence(), last)
			}
			break
		}
		if f.GetSnapshot() == nil {
			t.Fatalf("%v before the end of the snapshot", f)
		}
		parts++
		for _, n := range f.GetSnapshot().GetNodes() {
			delete(nodes, n.GetNodeId())
		}
	}
	if len(nodes) != 0 || parts != 3 {
		t.Fatalf("%d nodes are missing, %d parts", len(nodes), parts)
	}
	// A change by another process wakes no poll. The poll for the ping finds it, and the delta is sent before the pong.
	id := ids.New()
	want := b.change(id, "late")
	s.ping(7)
	if d := b.next(s).GetDelta(); d.GetNodeId() != id || d.GetSequence() != want ||
		d.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING {
		t.Fatalf("delta %v", d)
	}
	if p := b.next(s).GetPong(); p.GetPingId() != 7 || p.GetSequence() != want {
		t.Fatalf("pong %v", p)
	}
	// A change of this process wakes the poller.
	want = b.change(id, "late")
	b.changed.Notify()
	if d := b.next(s).GetDelta(); d.GetSequence() != want {
		t.Fatalf("delta %v, want %d", d, want)
	}
}

// TestPongOnlyAfterAReadBegunLater blocks the database while pings arrive: none is answered before a read that began
// after it.
func TestPongOnlyAfterAReadBegunLater(t *testing.T) {
	b := newBench(t, authority.Config{Poll: time.Hour, Timeout: 200 * time.Millisecond})
	id := ids.New()
	b.change(id, "one")
	b.changed.Notify()
	s, _ := b.watch()
	for b.next(s).GetSnapshotEnd() == nil {
	}
	<-s.out // the issuers
	held, err := b.db.OwnerPool().Begin(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := held.Exec(b.ctx, `LOCK TABLE recovery.identity IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	s.ping(1)
	s.ping(2)
	testkit.Eventually(t, testkit.Patience, func() error {
		if b.poller.Health(b.ctx) == nil {
			return fmt.Errorf("the poller says that it reads")
		}
		return nil
	})
	select {
	case f := <-s.out:
		t.Fatalf("%v without a read", f)
	default:
	}
	if _, err := held.Exec(b.ctx, `UPDATE recovery.identity
		SET state = 'retired', authority_seq = authority_seq + 1`); err != nil {
		t.Fatal(err)
	}
	if err := held.Commit(b.ctx); err != nil {
		t.Fatal(err)
	}
	if d := b.next(s).GetDelta(); d.GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED {
		t.Fatalf("delta %v", d)
	}
	for want := int64(1); want <= 2; want++ {
		if p := b.next(s).GetPong(); p.GetPingId() != want {
			t.Fatalf("pong %v, want %d", p, want)
		}
	}
}

// TestNodesRetiredLongAgoAreNotRead: a replica that starts reads what is live and what was retired lately, in however
// many batches, and so does not read all history.
func TestNodesRetiredLongAgoAreNotRead(t *testing.T) {
	want := map[string]bool{}
	b := newBench(t, authority.Config{Poll: time.Hour, Batch: 2, RetiredFor: 2 * time.Hour}, func(b *bench) {
		for i := range 9 {
			id := ids.New()
			b.change(id, fmt.Sprintf("node-%d", i))
			hours := 3
			switch i % 3 {
			case 0:
				want[id] = true
				continue
			case 1:
				want[id], hours = true, 1
			}
			if _, err := b.db.OwnerPool().Exec(b.ctx, `UPDATE recovery.identity SET state = 'retired',
				state_at = mesh.clock() - make_interval(hours => $2) WHERE node_id = $1`, id, hours); err != nil {
				b.t.Fatal(err)
			}
		}
	})
	s, _ := b.watch()
	got := map[string]bool{}
	for {
		f := b.next(s)
		for _, n := range f.GetSnapshot().GetNodes() {
			got[n.GetNodeId()] = true
		}
		if f.GetSnapshotEnd() != nil {
			break
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("a snapshot has %d nodes, want the %d that are live or were retired lately", len(got), len(want))
	}
}

func TestManyWatchersShareOnePoll(t *testing.T) {
	b := newBench(t, authority.Config{Poll: time.Hour})
	streams := make([]*stream, 8)
	for i := range streams {
		streams[i], _ = b.watch()
		for b.next(streams[i]).GetSnapshotEnd() == nil {
		}
	}
	for round := range int64(20) {
		want := b.change(ids.New(), fmt.Sprintf("node-%d", round))
		for _, s := range streams {
			s.ping(round)
		}
		for i, s := range streams {
			seen := false
			for {
				f := b.next(s)
				if f.GetDelta().GetSequence() == want {
					seen = true
				}
				if p := f.GetPong(); p != nil {
					if p.GetPingId() != round || p.GetSequence() < want || !seen {
						t.Fatalf("watcher %d: pong %v before delta %d", i, p, want)
					}
					break
				}
			}
		}
	}
}

func TestSlowWatcherIsDropped(t *testing.T) {
	b := newBench(t, authority.Config{Poll: time.Hour, Queue: 8})
	id := ids.New()
	b.change(id, "one")
	b.changed.Notify()
	slow, ended := b.watch()
	quick, _ := b.watch()
	for b.next(quick).GetSnapshotEnd() == nil {
	}
	for b.next(slow).GetSnapshotEnd() == nil {
	}
	for range 20 {
		want := b.change(id, "one")
		b.changed.Notify()
		for b.next(quick).GetDelta().GetSequence() != want {
		}
	}
	// The slow watcher reads once more, and finds that it was dropped.
	<-slow.out
	select {
	case err := <-ended:
		if !fault.Has(err, commonv1.Reason_REASON_SLOW_CONSUMER) {
			t.Fatalf("ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the slow watcher is still served")
	}
}

func TestFirstFrameSubscribes(t *testing.T) {
	b := newBench(t, authority.Config{})
	s := newStream()
	defer close(s.done)
	s.ping(1)
	if err := b.poller.Watch(b.ctx, s); !fault.Has(err, commonv1.Reason_REASON_PROTOCOL_VIOLATION) {
		t.Fatalf("%v", err)
	}
}
