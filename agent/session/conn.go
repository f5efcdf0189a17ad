package session

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/session/outbox"
	"github.com/gpuaas/mesh/agent/session/transport"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

type stream = grpc.BidiStreamingClient[nodev1.ConnectRequest, nodev1.ConnectResponse]

// conn is one admitted session on a connection of its own.
type conn struct {
	client *Client
	cc     *grpc.ClientConn
	wire   *transport.Wire
	stream stream
	// opening keeps the time until Admitted; nil after that.
	opening *transport.Phases
	ctx     context.Context //nolint:containedctx // the life of the stream, which outlives the call that opened it
	cancel  context.CancelCauseFunc

	cert       *tls.Certificate
	nonce      string
	sessionID  string
	generation int64
	lists      bool // a RunList follows
	openedAt   time.Time

	interval atomic.Int64  // of heartbeats, in nanoseconds
	sooner   chan struct{} // has a value when the interval has become shorter
	burstAt  time.Time     // of the writer alone: the window in which frames are counted
	burst    int           // frames in it
	retired  chan struct{} // closed when another session took its place: from then on only heartbeats are sent
	leaving  chan struct{} // closed when the agent ends: Goodbye is sent and the stream closed
	dog      *time.Timer

	mu      sync.Mutex
	beat    int64 // sequence of the last heartbeat
	beatAt  time.Time
	awaited map[outbox.Key]struct{} // results sent here and not acknowledged

	ended chan struct{}
	err   error // why it ended; read after ended is closed
}

// serve runs the session's reader and writer until the stream ends.
func (k *conn) serve() {
	defer close(k.ended)
	k.dog = time.AfterFunc(k.patience(), func() { k.cancel(errSilent) })
	defer k.dog.Stop()
	var writer sync.WaitGroup
	writer.Go(func() { k.write() })
	err := k.read()
	if cause := context.Cause(k.ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	k.cancel(context.Canceled)
	writer.Wait()
	if closeErr := k.cc.Close(); closeErr != nil && err == nil {
		err = closeErr
	}
	k.err = err
}

// patience returns how long the server may send nothing: every heartbeat is answered, and the first one is sent within
// an interval.
func (k *conn) patience() time.Duration {
	return 2*time.Duration(k.interval.Load()) + keepaliveTimeout
}

func (k *conn) read() error {
	for {
		k.dog.Reset(k.patience())
		frame, err := k.stream.Recv()
		if err != nil {
			return transport.Understand(err, k.wire)
		}
		// While this side works on a frame it does not read, so the watchdog must not count that time against the server.
		k.dog.Stop()
		if err := k.handle(k.ctx, frame); err != nil {
			return err
		}
	}
}

// warn logs the error of a hook; nil is none.
func (k *conn) warn(ctx context.Context, what string, err error) {
	if err != nil {
		//nolint:sloglint // the callers' messages are constants
		k.client.deps.Logger.LogAttrs(ctx, slog.LevelWarn, what, slog.Any("error", err))
	}
}

func (k *conn) handle(ctx context.Context, frame *nodev1.ConnectResponse) error {
	hooks := &k.client.deps.Hooks
	switch f := frame.GetFrame().(type) {
	case *nodev1.ConnectResponse_HeartbeatAck:
		k.acknowledgeBeat(f.HeartbeatAck)
		if hooks.ProfileAnnounced != nil && !k.isRetired() {
			hooks.ProfileAnnounced(ctx, f.HeartbeatAck.GetProfileFingerprint())
		}
	case *nodev1.ConnectResponse_TaskOffer:
		if hooks.Offer != nil && !k.isRetired() {
			k.warn(ctx, "task not taken", hooks.Offer(f.TaskOffer))
		}
	case *nodev1.ConnectResponse_TaskResultAck:
		k.acknowledged(f.TaskResultAck.GetTasks())
		if hooks.Acknowledged != nil {
			k.warn(ctx, "acknowledgement not kept, the result is sent again",
				hooks.Acknowledged(ctx, f.TaskResultAck.GetTasks()))
		}
	case *nodev1.ConnectResponse_TaskReportRefused:
		if !f.TaskReportRefused.GetEnvelopeWanted() {
			k.acknowledged(f.TaskReportRefused.GetTasks())
		}
		if hooks.ReportRefused != nil {
			k.warn(ctx, "refused report not dropped, it is sent again", hooks.ReportRefused(ctx, f.TaskReportRefused))
		}
	case *nodev1.ConnectResponse_TaskCancel:
		if hooks.Cancel != nil {
			k.warn(ctx, "cancel not taken", hooks.Cancel(f.TaskCancel))
		}
	case *nodev1.ConnectResponse_RunList:
		if hooks.RunList != nil && !k.isRetired() {
			hooks.RunList(ctx, f.RunList)
		}
	case *nodev1.ConnectResponse_OutputRequest:
		if hooks.Output != nil && !k.isRetired() {
			hooks.Output(ctx, f.OutputRequest)
		}
	case *nodev1.ConnectResponse_PolicyUpdate:
		if !k.isRetired() { // the session that took its place has a later policy from its own Welcome on
			k.applyPolicy(f.PolicyUpdate.GetPolicy())
		}
	case *nodev1.ConnectResponse_TaskKeys:
		return k.onTaskKeys(ctx, f.TaskKeys)
	case *nodev1.ConnectResponse_ServiceRoots:
		k.client.takeRoots(ctx, f.ServiceRoots)
	case *nodev1.ConnectResponse_ProfileOffer:
		if hooks.Profile != nil && !k.isRetired() {
			hooks.Profile(ctx, f.ProfileOffer.GetProfile())
		}
	case *nodev1.ConnectResponse_CertificateIssued:
		k.client.send(ctx, event{conn: k, issued: f.CertificateIssued})
	case *nodev1.ConnectResponse_Reconnect:
		k.client.send(ctx, event{conn: k, reconnect: f.Reconnect})
	case *nodev1.ConnectResponse_Challenge:
		return k.send(answerChallenge(k.cert, k.client.nodeID(), f.Challenge))
	case *nodev1.ConnectResponse_Denied:
		return fault.FromDenial(f.Denied)
	case *nodev1.ConnectResponse_Welcome, *nodev1.ConnectResponse_Admitted:
		return fmt.Errorf("%w: %T in an admitted session", errProtocol, f)
	default:
		// A newer control plane may send frames that this build does not have.
	}
	return nil
}

// send sends the reader's own replies. grpc allows one sender at a time, so a reply goes through the queue, which the
// admitted session sends.
func (k *conn) send(frame *nodev1.ConnectRequest, err error) error {
	if err != nil {
		return err
	}
	return k.client.out.Request(frame)
}

func (k *conn) isRetired() bool {
	select {
	case <-k.retired:
		return true
	default:
		return false
	}
}

func (k *conn) acknowledgeBeat(ack *nodev1.HeartbeatAck) {
	k.mu.Lock()
	sent, last := k.beatAt, k.beat
	k.mu.Unlock()
	if ack.GetSequence() == last {
		k.client.observe(ack.GetServerTime(), sent)
	}
}

func (k *conn) applyPolicy(policy *commonv1.NodePolicy) {
	if policy == nil {
		return
	}
	const least, most = time.Second, 10 * time.Minute
	if d := policy.GetHeartbeatInterval().AsDuration(); d > 0 {
		is := int64(min(max(d, least), most))
		if was := k.interval.Swap(is); is < was {
			select {
			case k.sooner <- struct{}{}:
			default:
			}
		}
	}
	if hook := k.client.deps.Hooks.Policy; hook != nil {
		hook(policy)
	}
}

// write sends heartbeats and, until another session takes its place, what waits in the queue.
func (k *conn) write() {
	beat := time.NewTimer(k.client.jitter(time.Duration(k.interval.Load())))
	defer beat.Stop()
	wake := k.client.out.Wake()
	retired := k.retired
	for {
		select {
		case <-k.ctx.Done():
			return
		case <-k.leaving:
			k.leave()
			return
		case <-retired:
			// The session that took over has the queue. kick wakes its writer, in case this writer consumed the wake token
			// without serving it.
			wake, retired = nil, nil
			k.client.out.Kick()
		case <-beat.C:
			if !k.transmit(k.heartbeat()) {
				return
			}
			// A tenth of jitter spreads the heartbeats of agents that were admitted together.
			interval := time.Duration(k.interval.Load())
			beat.Reset(interval - interval/20 + k.client.jitter(interval/10))
		case <-k.sooner:
			// The peer counts from now on by the shorter interval. Those of all agents change at once, so they are spread.
			beat.Reset(k.client.jitter(time.Duration(k.interval.Load())))
		case <-wake:
			for !k.isRetired() {
				frame := k.client.out.Next()
				if frame == nil {
					break
				}
				if !k.transmit(frame) || !k.slowDown() {
					return
				}
			}
		}
	}
}

// slowDown keeps a burst, such as a thousand results after an outage, below the rate at which a server treats a peer as
// hostile. It returns false if the stream ended meanwhile.
func (k *conn) slowDown() bool {
	const window = 100 * time.Millisecond
	now := time.Now()
	if now.Sub(k.burstAt) >= window {
		k.burstAt, k.burst = now, 0
	}
	if k.burst++; k.burst < k.client.cfg.FramesPerSecond/10 {
		return true
	}
	wait := time.NewTimer(window - now.Sub(k.burstAt))
	defer wait.Stop()
	select {
	case <-wait.C:
		return true
	case <-k.ctx.Done():
		return false
	}
}

func (k *conn) transmit(frame *nodev1.ConnectRequest) bool {
	if result, ok := frame.GetFrame().(*nodev1.ConnectRequest_TaskResult); ok {
		k.mu.Lock()
		if k.awaited == nil {
			k.awaited = map[outbox.Key]struct{}{}
		}
		k.awaited[outbox.KeyOf(result.TaskResult.GetTask())] = struct{}{}
		k.mu.Unlock()
	}
	// The reader gets the cause: the error of Send is only that the stream is over.
	return k.stream.Send(frame) == nil
}

func (k *conn) acknowledged(refs []*nodev1.TaskRef) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, ref := range refs {
		delete(k.awaited, outbox.KeyOf(ref))
	}
}

func (k *conn) unacknowledged() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.awaited)
}

func (k *conn) heartbeat() *nodev1.ConnectRequest {
	k.mu.Lock()
	k.beat++
	sequence := k.beat
	k.beatAt = time.Now()
	k.mu.Unlock()
	beat := &nodev1.Heartbeat{
		Sequence: sequence, Monotonic: durationpb.New(k.client.deps.Clock.Elapsed()),
		WallClock: timestamppb.New(k.client.deps.Clock.Wall()),
	}
	if hook := k.client.deps.Hooks.ChangedFacts; hook != nil && !k.isRetired() {
		beat.ChangedFacts = hook()
	}
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_Heartbeat{Heartbeat: beat}}
}

// leave ends the stream in order: it sends what waits and Goodbye, and closes its side. The server's end follows.
func (k *conn) leave() {
	if !k.isRetired() {
		k.client.Flush()
	}
	for !k.isRetired() {
		frame := k.client.out.Next()
		if frame == nil || !k.transmit(frame) {
			break
		}
	}
	goodbye := &nodev1.ConnectRequest{
		Frame: &nodev1.ConnectRequest_Goodbye{Goodbye: &nodev1.Goodbye{Reason: errGoodbye.Error()}},
	}
	if err := k.stream.Send(goodbye); err != nil && !errors.Is(err, io.EOF) {
		return
	}
	if err := k.stream.CloseSend(); err != nil {
		k.cancel(errGoodbye)
	}
}
