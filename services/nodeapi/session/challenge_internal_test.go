package session

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/services/nodeapi/roster"
	"github.com/gpuaas/mesh/services/nodeapi/session/admission"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
	"github.com/gpuaas/mesh/services/nodeapi/session/skew"
)

// challenged is the stream of an agent that answers a challenge after a while, with a valid signature.
type challenged struct {
	grpc.BidiStreamingServer[nodev1.ConnectRequest, nodev1.ConnectResponse]

	node  string
	key   *ecdsa.PrivateKey
	after time.Duration
	nonce []byte
}

func (c *challenged) Send(f *nodev1.ConnectResponse) error {
	if ch := f.GetChallenge(); ch != nil {
		c.nonce = ch.GetNonce()
	}
	return nil
}

func (c *challenged) Recv() (*nodev1.ConnectRequest, error) {
	time.Sleep(c.after) // simulated
	signature, err := joinstate.SignChallenge(c.key, c.nonce, c.node)
	return &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_ChallengeAnswer{
		ChallengeAnswer: &nodev1.ChallengeAnswer{Nonce: c.nonce, Signature: signature},
	}}, err
}

// Close does not end a read: what the connection has received before is still read.
func (c *challenged) Close() error { return nil }

// challengeReports keeps what is reported of challenges.
type challengeReports struct {
	Authority

	answered []bool
}

func (r *challengeReports) ReportChallenge(_ context.Context, req *recoveryv1.ReportChallengeRequest) (
	*recoveryv1.ReportChallengeResponse, error,
) {
	r.answered = append(r.answered, req.GetAnswered())
	return &recoveryv1.ReportChallengeResponse{}, nil
}

// uncounted are the metrics of a server of which a test counts nothing.
type uncounted struct{ Metrics }

func (uncounted) Cut(bounds.Cut) {}

// TestALateAnswerToAChallengeIsNone checks that a valid answer counts up to challenge_within by the clock and not
// after it, whether the timer is in time or late.
func TestALateAnswerToAChallengeIsNone(t *testing.T) {
	const within = 5 * time.Second
	late := func(_ time.Duration, end func()) *time.Timer { return time.AfterFunc(time.Hour, end) }
	for name, c := range map[string]struct {
		after time.Duration
		timer func(time.Duration, func()) *time.Timer
		want  bool
	}{
		"in time":                     {within - time.Millisecond, time.AfterFunc, true},
		"late":                        {within + time.Millisecond, time.AfterFunc, false},
		"in time, and the timer late": {within, late, true},
		"late, and the timer later":   {within + time.Millisecond, late, false},
		"a minute late, and no timer": {time.Minute, late, false},
	} {
		t.Run(name, func(t *testing.T) {
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			validator, err := protovalidate.New()
			if err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				reports := &challengeReports{}
				stream := &challenged{node: "4a0e8a6e-3a4a-7b61-8a3b-0d7b6c1f2e3d", key: key, after: c.after}
				lim := defaultLimits
				lim.Challenge = within
				all := roster.New(slog.New(slog.DiscardHandler), roster.Config{}, nil)
				sess := all.Add("s", roster.Identity{NodeID: stream.node, Conn: stream}, stream, time.Now().Add(time.Hour),
					time.Now().Add(time.Hour))
				h := &handler{
					server: &Server{
						lim: lim, validate: validator, deps: Deps{Authority: reports, Metrics: uncounted{}},
						cfg: Config{Clock: &skew.Clock{}},
					}, stream: stream, sess: sess,
					opening: &opening{
						leaf: &x509.Certificate{PublicKey: &key.PublicKey}, conn: &admission.Conn{},
						hello: &nodev1.Hello{NodeId: stream.node},
					},
				}
				err := h.challenge(t.Context(), c.timer)
				if _, denied := fault.As(err); !denied || errors.Is(err, io.EOF) {
					t.Errorf("the session ends with %v", err)
				}
				if len(reports.answered) != 1 || reports.answered[0] != c.want {
					t.Errorf("reported %v, want %t", reports.answered, c.want)
				}
			})
		})
	}
}
