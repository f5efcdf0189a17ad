package enrol

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/enrol/limits"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// Config bounds enrolment; zero fields take the defaults.
type Config struct {
	TrustDomain string
	// ClaimLease is how long one attempt may take before another may begin: 10 s.
	ClaimLease time.Duration
	// SignTimeout of one attempt at the authority, shorter than the lease: 7 s.
	SignTimeout time.Duration
	// MintWait and MintLimit bound how another key may take a launch secret whose first certificate was never used: after
	// 30 s, 3 times.
	MintWait  time.Duration
	MintLimit int32
	// PerAddress and its burst bound the requests a second of one address before it has proved anything: 50 and 500, since
	// a whole site may share one address.
	PerAddress      float64
	PerAddressBurst int
	// PerToken and its burst bound the attempts a second with one token and of one node: 2 and 20.
	PerToken      float64
	PerTokenBurst int
	// PerSecond and Burst bound the attempts a second of all callers that have proved a token and a key: 200 and 400.
	// Callers without a valid token cannot use them up.
	PerSecond float64
	Burst     int
	// Signings is how many requests may be at the authority at once: 16.
	Signings int
}

var defaults = Config{
	ClaimLease: 10 * time.Second, SignTimeout: 7 * time.Second,
	MintWait: 30 * time.Second, MintLimit: 3, PerAddress: 50, PerAddressBurst: 500, PerToken: 2, PerTokenBurst: 20,
	PerSecond: 200, Burst: 400,
	Signings: 16,
}

// Deps are the dependencies of an Enroller.
type Deps struct {
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: metrics are kept and not exposed
	Pool       *pgxpool.Pool
	Signer     ca.Signer
	Policy     policy.Reader
	// Profiles has the profiles that nodes are given.
	Profiles Profiles
	// TaskKeys returns the public keys by which agents verify tasks, in the form of GPUAAS_TASK_SIGNING_PUBKEYS.
	TaskKeys func() (string, error)
	// RecoveryTokens has the keys of recovery tokens. Nil: the provisioner's key alone.
	RecoveryTokens *ca.RecoveryRing
	// JoinStates verifies the join states that nodes present.
	JoinStates identity.Verifier
	// Audit records refusals. Nil: none are recorded.
	Audit *audit.Log
	// Wake, Changed and Notices are notified as described at identity.Deps.
	Wake, Changed, Notices *events.Signal
}

// Profiles are the profiles of nodes, by name.
type Profiles interface {
	// Name returns the name of a node's profile; empty stands for the default.
	Name(name string) string
	// Active returns the version that nodes of a name are given, or fault profile_unknown.
	Active(ctx context.Context, name string) (*commonv1.Profile, error)
}

// Enroller issues certificates. Safe for concurrent use; any number of replicas share the database.
type Enroller struct {
	deps       Deps
	cfg        Config
	perAddress *limits.ByKey // of requests, before anything in them is checked
	perProof   *limits.ByKey // of attempts, by their token, or the proof of a host that has none, before it is verified
	perNode    *limits.ByKey // of verified attempts; one bucket more is of the claims that could not be verified
	allNodes   *rate.Limiter // of the verified attempts of all nodes together
	signing    chan struct{} // a place for each request that is at the authority
	outcomes   *prometheus.CounterVec
	recovery   *ca.RecoveryRing
}

// New checks the dependencies; it touches neither the database nor the authority.
func New(deps Deps, cfg Config) (*Enroller, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Signer == nil || deps.Policy == nil || deps.Profiles == nil ||
		deps.TaskKeys == nil || deps.JoinStates == nil {
		return nil, errors.New("enroller needs a logger, a pool, an authority, a policy, a profile, task keys and a verifier")
	}
	cfg = config.Or(cfg, defaults)
	if err := pki.NodeID(cfg.TrustDomain, "x").Validate(); err != nil {
		return nil, fmt.Errorf("enroller: %w", err)
	}
	if cfg.SignTimeout >= cfg.ClaimLease {
		return nil, fmt.Errorf("enroller: a signing may take %s, its claim only %s", cfg.SignTimeout, cfg.ClaimLease)
	}
	recovery := deps.RecoveryTokens
	if recovery == nil {
		var err error
		if recovery, err = ca.NewRecoveryRing(deps.Signer.ProvisionerKey(), cfg.TrustDomain); err != nil {
			return nil, fmt.Errorf("enroller: %w", err)
		}
	}
	e := &Enroller{
		deps: deps, cfg: cfg, recovery: recovery, signing: make(chan struct{}, cfg.Signings),
		perAddress: limits.New(cfg.PerAddress, cfg.PerAddressBurst), perProof: limits.New(cfg.PerToken, cfg.PerTokenBurst),
		perNode: limits.New(cfg.PerToken, cfg.PerTokenBurst), allNodes: rate.NewLimiter(rate.Limit(cfg.PerSecond), cfg.Burst),
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "recovery_enrollments_total",
			Help: "Attempts to obtain a certificate, by way and outcome: issued, repeated, or the reason of the refusal.",
		}, []string{"way", "outcome"}),
	}
	if deps.Registerer != nil {
		if err := deps.Registerer.Register(e.outcomes); err != nil {
			return nil, fmt.Errorf("register enrolment metrics: %w", err)
		}
	}
	return e, nil
}

// allowNode takes one attempt from the budgets of one node and of all nodes. It is called once the caller has proved
// its token and key.
func (e *Enroller) allowNode(nodeID string) error {
	now := time.Now()
	if err := e.perNode.Allow(nodeID, now); err != nil {
		return err
	}
	return limits.Take(e.allNodes, now)
}

// count counts an attempt under the label of its outcome. The labels are a closed set.
func (e *Enroller) count(way string, repeated bool, err error) {
	outcome := "issued"
	switch {
	case err != nil:
		outcome = obs.ReasonLabel(fault.ReasonOf(err))
	case repeated:
		outcome = "repeated"
	}
	e.outcomes.WithLabelValues(way, outcome).Inc()
}

func (e *Enroller) committed() {
	e.deps.Wake.Notify()
	e.deps.Changed.Notify()
	e.deps.Notices.Notify()
}

// signed is a certificate that the authority has signed and the database does not have yet.
type signed struct {
	serial, issuer      string
	chainPEM            []byte
	notBefore, notAfter time.Time
}

// sign requests a certificate from the authority. The time and the number of such requests are bounded, so that a slow
// authority does not block every request of the process.
func (e *Enroller) sign(ctx context.Context, c *claim, csr []byte, instanceID string) (signed, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.SignTimeout)
	defer cancel()
	select {
	case e.signing <- struct{}{}:
		defer func() { <-e.signing }()
	case <-ctx.Done():
		return signed{}, fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "",
			fault.Cause(context.Cause(ctx)))
	}
	issued, err := e.deps.Signer.Sign(ctx, ca.SignRequest{
		CSR: csr, NodeID: c.nodeID, NodeInstanceID: instanceID, Profile: e.deps.Profiles.Name(c.profile),
		TTL: e.deps.Policy.Current().CertificateTTL(),
		Now: c.now(),
	})
	if err != nil {
		return signed{}, fmt.Errorf("sign certificate: %w", err)
	}
	chain, err := pki.ParseChain(issued.Chain)
	if err != nil {
		return signed{}, fmt.Errorf("read signed certificate: %w", err)
	}
	out := signed{
		serial: issued.Serial, chainPEM: pki.EncodeCertificates(chain), notBefore: issued.NotBefore,
		notAfter: issued.NotAfter,
	}
	if len(chain) > 1 {
		out.issuer = pki.Fingerprint(chain[1])
		return out, nil
	}
	if out.issuer, err = e.deps.Signer.SigningFingerprint(ctx); err != nil {
		return signed{}, fmt.Errorf("read authority's fingerprint: %w", err)
	}
	return out, nil
}

// NodePolicy returns the heartbeat policy that an agent is sent. The heartbeat interval is a twelfth of the silence
// that is tolerated, so that several heartbeats may be lost before the session counts as late. nodeapi lengthens it
// with the size of the fleet.
func NodePolicy(set policy.Set) *commonv1.NodePolicy {
	heartbeat := min(max(set.HeartbeatStaleAfter()/12, 500*time.Millisecond), 15*time.Second)
	return &commonv1.NodePolicy{
		HeartbeatInterval: durationpb.New(heartbeat), CertificateTtl: durationpb.New(set.CertificateTTL()),
		StreamMaxAge: durationpb.New(set.StreamMaxAge()), AutoRecovery: set.AutoRecovery(),
		RecoveryAttemptsPerHour: int32(set.RecoveryAttemptsPerHour()), TrustDwell: durationpb.New(set.TrustDwell()),
		CrashLoopRestarts: int32(set.WorkloadCrashLoopRestarts()),
	}
}
