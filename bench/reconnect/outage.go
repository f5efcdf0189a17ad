package reconnect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/rig"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// outage is one death of all servers and the return of all clients.
type outage struct {
	down    time.Duration   // from the kill to the first listener that accepts
	listens []time.Duration // from the kill until each server accepts
	up, all time.Time       // when the first server accepted, and when the last client was back
	worked  time.Time       // when the last agent could be given work; zero for bare clients
	clients []comeback
	spent   map[string]time.Duration // processor time from up to all, by process
	wal     int64
	failed  map[string]int // tries of clients, by the error
	counts  map[string]int // of the replicas' own metrics: what they refused
}

// took returns how long the return of all clients took.
func (o outage) took() time.Duration { return o.all.Sub(o.up) }

// killNodeAPI kills all replicas of nodeapi, starts them again, and waits until all agents are admitted.
func (w *world) killNodeAPI(ctx context.Context) (outage, error) {
	var o outage
	if err := w.agents.Ask(ctx, soon, "mark", nil, nil); err != nil {
		return o, err
	}
	if err := w.log.begin(ctx); err != nil {
		return o, err
	}
	killed := time.Now()
	if w.faultAt.IsZero() {
		w.faultAt = killed
	}
	for _, p := range w.cluster.NodeAPI {
		p.LetDie()
		if err := p.Kill9(); err != nil {
			return o, fmt.Errorf("kill %s: %w", p.Name, err)
		}
	}
	for _, p := range w.cluster.NodeAPI {
		if err := p.Start(); err != nil {
			return o, fmt.Errorf("start %s: %w", p.Name, err)
		}
	}
	if err := w.comeBack(ctx, &o, killed, w.agents, w.replicas); err != nil {
		return o, err
	}
	for _, p := range w.cluster.NodeAPI {
		if err := addCounts(ctx, p.Ops, &o); err != nil {
			return o, err
		}
	}
	return o, w.log.end(ctx)
}

// readWork reads when the agents could be given work again.
func (w *world) readWork(ctx context.Context, o *outage) error {
	if err := w.agents.Ask(ctx, soon, "times", nil, &o.clients); err != nil {
		return err
	}
	for _, c := range o.clients {
		if at := time.Unix(0, c.Worked); at.After(o.worked) {
			o.worked = at
		}
	}
	return nil
}

// killBare kills the bare servers, and has each accept as long after the kill as its replica of nodeapi did.
func (w *world) killBare(ctx context.Context, listens []time.Duration) (outage, error) {
	var o outage
	if err := w.clients.Ask(ctx, soon, "mark", nil, nil); err != nil {
		return o, err
	}
	killed := time.Now()
	for _, p := range w.bare {
		if err := p.Kill(); err != nil {
			return o, err
		}
	}
	started, ctx2 := errgroup.WithContext(ctx)
	for i := range w.bare {
		started.Go(func() error { return w.startBare(ctx2, i, listens[i]-time.Since(killed)) })
	}
	err := w.comeBack(ctx, &o, killed, w.clients, w.bareAt)
	return o, errors.Join(err, started.Wait())
}

// comeBack waits until the servers accept, and until all clients are back, and fills in o.
func (w *world) comeBack(
	ctx context.Context, o *outage, killed time.Time, clients *process.Child, addrs []string,
) error {
	at := make([]time.Time, len(addrs))
	waiting, waitCtx := errgroup.WithContext(ctx)
	first := make(chan struct{}, len(addrs))
	for i, addr := range addrs {
		waiting.Go(func() error {
			var err error
			at[i], err = accepts(waitCtx, addr)
			first <- struct{}{}
			return err
		})
	}
	<-first
	before, wal, err := w.spent(ctx)
	if err != nil {
		return errors.Join(err, waiting.Wait())
	}
	if err := waiting.Wait(); err != nil {
		return err
	}
	o.up = slices.MinFunc(at, time.Time.Compare)
	for _, t := range at {
		o.listens = append(o.listens, t.Sub(killed))
	}
	if err := w.awaitAll(ctx, clients); err != nil {
		return err
	}
	after, walAfter, err := w.spent(ctx)
	if err != nil {
		return err
	}
	o.wal, o.spent = walAfter-wal, map[string]time.Duration{}
	for name, d := range after {
		o.spent[name] = d - before[name]
	}
	if err := clients.Ask(ctx, soon, "times", nil, &o.clients); err != nil {
		return err
	}
	if err := clients.Ask(ctx, soon, "failed", nil, &o.failed); err != nil {
		return err
	}
	byDone := func(a, b comeback) int { return cmp.Compare(a.Done, b.Done) }
	o.all = time.Unix(0, slices.MaxFunc(o.clients, byDone).Done)
	// On a busy machine a client may be back before this process sees that the server accepts.
	if first := time.Unix(0, slices.MinFunc(o.clients, byDone).Done); first.Before(o.up) {
		o.up = first
	}
	o.down = o.up.Sub(killed)
	return nil
}

// awaitAll waits until all clients are back, and writes every few seconds how many are.
func (w *world) awaitAll(ctx context.Context, clients *process.Child) error {
	const every = 5 * time.Second
	began := time.Now()
	for said := began; ; {
		var n int
		if err := clients.Ask(ctx, soon, "back", nil, &n); err != nil || n >= w.opts.Agents {
			return err
		}
		now := time.Now()
		if now.Sub(said) >= every {
			said = now
			w.say("%d of %d are back after %.0f s", n, w.opts.Agents, now.Sub(began).Seconds())
		}
		if now.Sub(began) > within || !app.Sleep(ctx, 20*time.Millisecond) {
			return fmt.Errorf("%d of %d are back after %s", n, w.opts.Agents, now.Sub(began))
		}
	}
}

// accepts waits until a server accepts connections, and returns when it did.
func accepts(ctx context.Context, addr string) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			now := time.Now()
			_ = conn.Close() // only that it was accepted counts
			return now, nil
		}
		if !app.Sleep(ctx, 5*time.Millisecond) {
			return time.Time{}, fmt.Errorf("await the listener %s: %w", addr, errors.Join(err, context.Cause(ctx)))
		}
	}
}

// spent returns the processor time of the processes that live, by name, and the length of the write-ahead log.
func (w *world) spent(ctx context.Context) (map[string]time.Duration, int64, error) {
	of := func(list []*cluster.Process) time.Duration {
		var total time.Duration
		for _, p := range list {
			total += rig.ProcessorTime(int32(p.PID())) // a process id
		}
		return total
	}
	c := w.cluster
	out := map[string]time.Duration{
		"nodeapi": of(c.NodeAPI), "recovery": of(c.Recovery), "lifecycle": of(c.Lifecycle), "readmodel": of(c.Readmodel),
		"postgres": rig.ServerTime(c.Stores.Postgres.PID()),
	}
	for name, list := range map[string][]*process.Child{"agents": {w.agents}, "clients": {w.clients}, "servers": w.bare} {
		for _, child := range list {
			out[name] += rig.ProcessorTime(int32(child.PID())) // a process id
		}
	}
	wal, _, err := w.db.Written(ctx)
	return out, wal, err
}

// partsOf are the processes that take part in the return of the agents, or of the bare clients.
var partsOf = map[string][]string{
	"agents": {"nodeapi", "recovery", "postgres", "lifecycle", "readmodel", "agents"}, "bare": {"servers", "clients"},
}

// describe puts the figures of outages into details.
func describe(details map[string]any, name string, list []outage) {
	var took, down, lastDial, first, worked []float64
	var open, back []time.Duration
	var tries, clients, wal int64
	spent := map[string]time.Duration{}
	failed, counts := map[string]int{}, map[string]int{}
	for _, o := range list {
		for text, n := range o.failed {
			failed[text] += n
		}
		for text, n := range o.counts {
			counts[text] += n
		}
		var last int64
		soonest := o.all
		for _, c := range o.clients {
			if at := time.Unix(0, c.Done); at.Before(soonest) {
				soonest = at
			}
			open = append(open, time.Duration(c.Done-c.Dialled))
			back = append(back, time.Unix(0, c.Done).Sub(o.up))
			last = max(last, c.Dialled)
			tries += c.Tries
		}
		took = append(took, round(o.took().Seconds()))
		down = append(down, round(o.down.Seconds()))
		lastDial = append(lastDial, round(time.Unix(0, last).Sub(o.up).Seconds()))
		first = append(first, round(soonest.Sub(o.up).Seconds()))
		worked = append(worked, round(o.worked.Sub(o.up).Seconds()))
		clients += int64(len(o.clients))
		wal += o.wal
		for part, d := range o.spent {
			spent[part] += d
		}
	}
	per := func(d time.Duration) float64 { return round(1000 * d.Seconds() / float64(max(clients, 1))) }
	maps.Copy(details, map[string]any{
		name + "_back_s": took, name + "_first_back_s": first, name + "_servers_down_s": down,
		name + "_last_dial_s": lastDial, // of the connections that stand: until then clients waited
		name + "_open_ms": fmt.Sprintf("p50 %.0f, p99 %.0f, max %.0f", bench.Percentile(open, .5),
			bench.Percentile(open, .99), bench.Percentile(open, 1)),
		name + "_back_ms": fmt.Sprintf("p50 %.0f, p90 %.0f, p99 %.0f, max %.0f", bench.Percentile(back, .5),
			bench.Percentile(back, .9), bench.Percentile(back, .99), bench.Percentile(back, 1)),
		name + "_failed_tries": counted(failed), // in all rounds together
		name + "_tries_each":   round(float64(tries) / float64(max(clients, 1))),
	})
	var all time.Duration
	for _, part := range partsOf[name] {
		all += spent[part]
		details[name+"_cpu_ms_each_"+part] = per(spent[part])
	}
	details[name+"_cpu_ms_each"] = per(all)
	if name == "agents" {
		details["agents_work_again_s"] = worked // until the gate of the last one was up
		details["agents_cpu_ms_each_admission"] = per(spent["nodeapi"] + spent["recovery"] + spent["postgres"])
		details["agents_wal_bytes_each"] = wal / max(clients, 1)
		details["replicas_counted"] = counted(counts) // in all rounds together
		return
	}
	var mesh time.Duration // the background of the baseline
	for _, part := range partsOf["agents"] {
		mesh += spent[part]
	}
	details["bare_cpu_ms_each_mesh_beside"] = per(mesh)
}
