package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// DefaultProbeTimeout bounds one readiness probe; maxProbeTimeout is the longest that a spec may set.
const (
	DefaultProbeTimeout = 2 * time.Second
	maxProbeTimeout     = 30 * time.Second
)

// DefaultMinUptime is how long a workload without a probe runs before it is ready; maxMinUptime is the longest that a
// spec may set.
const (
	DefaultMinUptime = 2 * time.Second
	maxMinUptime     = 5 * time.Minute
)

// waitsForList is the detail of a workload that should run and was not started after a boot.
const waitsForList = "waits for the control plane to list its epoch as one that may run on this node"

// check returns the status of a workload, or nil if it is not deployed. It does not wait for an operation under way:
// the files are enough.
func (r *Runtime) check(ctx context.Context, w *workload) *nodev1.WorkloadStatus {
	if w.mu.TryLock() {
		defer w.mu.Unlock()
		if !w.present {
			if w.failed != "" {
				return &nodev1.WorkloadStatus{
					Name: w.key.name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_UNSPECIFIED,
					Detail: w.failed,
				}
			}
			return nil
		}
		return r.status(ctx, w)
	}
	busy := &workload{key: w.key, dir: w.dir}
	found, err := readFile(busy.dir, fileSpec, &busy.spec)
	if err != nil || !found {
		return nil
	}
	_, _ = readFile(busy.dir, fileDesired, &busy.want)
	return r.status(ctx, busy)
}

// status returns the status of a workload by its files, the kernel's facts about its process, and a probe.
func (r *Runtime) status(ctx context.Context, w *workload) *nodev1.WorkloadStatus {
	s := w.state()
	out := &nodev1.WorkloadStatus{
		Name: w.key.name, Restarts: s.restarted(), Detail: s.Detail, Epoch: w.spec.Epoch, GpuDeviceIds: w.spec.GPUs,
		Adopted: w.adopted || s.Adopted, Uid: int32(max(w.spec.UID, 0)), //nolint:gosec // from a range of ids
	}
	if w.spec.UID < 0 {
		out.Uid = int32(ownUID()) //nolint:gosec // a user id
	}
	if len(w.spec.Cgroups) > 0 {
		out.Cgroup = w.spec.Cgroups[0]
	}
	if s.HasExited || s.Restarts > 0 {
		out.ExitCode = s.ExitCode
		if !s.ExitedAt.IsZero() {
			out.ExitedAt = timestamppb.New(s.ExitedAt)
		}
	}
	for _, p := range w.spec.Ports {
		out.Ports = append(out.Ports, &nodev1.Port{Name: p.Name, Port: p.Port})
	}
	if r.waits(w) {
		out.Phase, out.Detail = nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED, waitsForList
		return out
	}
	out.Phase = r.phase(w, s)
	if out.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING {
		out.Pid = int32(s.Child.PID) //nolint:gosec // a pid
		out.StartedAt = timestamppb.New(s.StartedAt)
		out.Ready, out.Detail = r.ready(ctx, w.spec, s.uptime())
	}
	if out.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED {
		out.Ready = finished(w.spec, s)
	}
	out.CrashLoop = r.loops(w, s, out.GetPhase())
	return out
}

// loops reports whether a workload exits again and again: it has been restarted as often in a row as makes a crash
// loop, each time after a short run, has exited once more, and its present run is not long enough yet to be the end of
// it.
func (r *Runtime) loops(w *workload, s state, phase nodev1.WorkloadPhase) bool {
	if !w.want.Run || s.Final || s.ShortRuns <= r.crashLoop.Load() {
		return false
	}
	return phase != nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING || s.uptime() < w.spec.calm()
}

// phase returns the phase of a workload by its shim's state and by which processes are alive.
func (r *Runtime) phase(w *workload, s state) nodev1.WorkloadPhase {
	running := s.BootID == r.boot && s.Child.alive()
	switch {
	case running && s.Phase == phaseRunning:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING
	case running:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING
	case s.Final || s.Phase == phaseExited && !w.want.Run:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
	case !w.want.Run:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	case s.Phase == phaseBackoff || s.Phase == phaseExited || s.Phase == phaseRunning:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF
	default:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING
	}
}

// finished reports whether a workload without a probe has done its work: it exited with status 0, after a run that was
// long enough for it to be ready, whether or not its readiness was checked meanwhile.
func finished(spec spec, s state) bool {
	return s.HasExited && s.ExitCode == 0 && !spec.Ready.asks() && s.RanFor >= spec.Ready.minUptime()
}

// ready reports whether a workload that has run for uptime is ready, and why not. It probes at most once.
func (r *Runtime) ready(ctx context.Context, s spec, uptime time.Duration) (bool, string) {
	if least := s.Ready.minUptime(); uptime < least {
		return false, fmt.Sprintf("has run for %.1f s of the %s s that make it ready",
			uptime.Truncate(100*time.Millisecond).Seconds(), strconv.FormatFloat(least.Seconds(), 'f', -1, 64))
	}
	if !s.Ready.asks() {
		return true, ""
	}
	var number int32
	for i, p := range s.Ports {
		if p.Name == s.Ready.Port || (s.Ready.Port == "" && i == 0) {
			number = p.Port
		}
	}
	timeout := s.Ready.Timeout
	if timeout <= 0 {
		timeout = DefaultProbeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, min(timeout, maxProbeTimeout))
	defer cancel()
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(int(number)))
	var err error
	if s.Ready.HTTPPath != "" {
		err = probeHTTP(ctx, "http://"+address+s.Ready.HTTPPath)
	} else {
		err = probeTCP(ctx, address)
	}
	if err != nil {
		return false, fmt.Sprintf("not ready: %v", err)
	}
	return true, ""
}

func probeTCP(ctx context.Context, address string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// probeHTTP sends one request, follows no redirect, and reads little of the response, since a tenant's program sends
// it.
func probeHTTP(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10}
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	defer transport.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return errors.New("no answer in time")
		}
		return err
	}
	_, _ = io.CopyN(io.Discard, resp.Body, 4096)
	_ = resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode > 399 {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}

// crashLoops is the digest of every workload in a crash loop: one that exits once more has not changed.
const crashLoops = "crash loop"

// observeChanges reports whether the status of any workload differs from that of the last call.
func (r *Runtime) observeChanges(ctx context.Context) bool {
	changed := false
	for _, w := range r.list() {
		var digest string
		if st := r.check(ctx, w); st.GetCrashLoop() {
			digest = crashLoops
		} else if st != nil {
			digest = strings.Join([]string{
				st.GetPhase().String(), strconv.FormatBool(st.GetReady()), strconv.Itoa(int(st.GetPid())),
				strconv.Itoa(int(st.GetRestarts())),
			}, " ")
		}
		r.mu.Lock()
		if w.last != digest {
			w.last, changed = digest, true
		}
		r.mu.Unlock()
	}
	return changed
}
