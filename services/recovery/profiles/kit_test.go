package profiles_test

import (
	"context"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// site is one replica's book and server over a database of their own, and the authorities of a mesh whose endpoints
// they verify.
type site struct {
	t           *testing.T
	ctx         context.Context // of a person
	db          *testkit.Database
	authorities *rpctest.Authorities
	book        *profiles.Book
	server      *profiles.Server
	metrics     *prometheus.Registry // of book

	api, recovery string // endpoints that prove to be what they are
}

func newSite(t *testing.T) *site {
	t.Helper()
	testkit.IO(t)
	s := &site{
		t: t, ctx: rpc.WithPerson(testkit.Context(t), rpc.Person{Subject: "ann", Roles: []string{"operator"}}),
		db: testkit.DB(t), authorities: rpctest.NewAuthorities(t), metrics: prometheus.NewRegistry(),
	}
	s.book = newBook(t, s.db.URL(pg.RoleRecovery), s.metrics)
	s.server = profiles.NewServer(s.book)
	s.api, s.recovery = endpoint(t, s.authorities, "nodeapi"), endpoint(t, s.authorities, "recovery")
	return s
}

// replica returns another replica's book and server over the same database.
func (s *site) replica() (*profiles.Book, *profiles.Server) {
	s.t.Helper()
	book := newBook(s.t, s.db.URL(pg.RoleRecovery), nil)
	return book, profiles.NewServer(book)
}

func newBook(t *testing.T, url string, metrics prometheus.Registerer) *profiles.Book {
	t.Helper()
	pool, err := pgxpool.New(testkit.Context(t), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	book, err := profiles.NewBook(profiles.Deps{
		Logger: testkit.Logger(t), Pool: pool, Default: "site", TrustDomain: rpctest.TrustDomain, Registerer: metrics,
	})
	if err != nil {
		t.Fatal(err)
	}
	return book
}

// endpoint is a TLS server that proves to be a service, and returns its address. It says nothing else.
func endpoint(t *testing.T, of *rpctest.Authorities, service string) string {
	t.Helper()
	address, _ := endpointUntil(t, of, service)
	return address
}

// endpointUntil is endpoint with what closes it.
func endpointUntil(t *testing.T, of *rpctest.Authorities, service string) (string, func()) {
	t.Helper()
	cfg, err := pki.ServerTLS(of.ServerTLS(t, service))
	if err != nil {
		t.Fatal(err)
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	go func() {
		for {
			raw, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				_ = tlsServer(raw, cfg).Handshake()
				_ = raw.Close()
			}()
		}
	}()
	return lis.Addr().String(), func() { _ = lis.Close() }
}

// request is a content of the default profile. Contents of two terminals differ.
func (s *site) request(terminal string) *recoveryv1.SetProfileRequest {
	return &recoveryv1.SetProfileRequest{
		Name: "site", ApiUrl: s.api, RecoveryUrl: "https://" + s.recovery, TerminalUrl: terminal,
		CaBundlePem: s.authorities.ServiceRoots.PEM(), Reason: "the site has moved",
	}
}

// set announces a content of its own and returns the version.
func (s *site) set() *recoveryv1.ProfileVersion {
	s.t.Helper()
	out, err := s.server.SetProfile(s.ctx, s.request(endpoint(s.t, s.authorities, "nodeapi")))
	if err != nil {
		s.t.Fatal(err)
	}
	return out.GetProfile()
}

func activate(ctx context.Context, by *profiles.Server, v *recoveryv1.ProfileVersion) error {
	_, err := by.ActivateProfile(ctx, &recoveryv1.ActivateProfileRequest{
		Name: v.GetProfile().GetName(), Version: v.GetProfile().GetVersion(), Reason: "it is tried",
	})
	return err
}

func (s *site) retire(v *recoveryv1.ProfileVersion, force bool) error {
	_, err := s.server.RetireProfile(s.ctx, &recoveryv1.RetireProfileRequest{
		Name: v.GetProfile().GetName(), Version: v.GetProfile().GetVersion(), Reason: "it is over", Force: force,
	})
	return err
}

// now returns a version as it is listed now: its number may be another one.
func (s *site) now(v *recoveryv1.ProfileVersion) *recoveryv1.ProfileVersion {
	list, err := s.server.ListProfiles(s.ctx, &recoveryv1.ListProfilesRequest{})
	if err != nil {
		s.t.Error(err)
	}
	for _, each := range list.GetItems() {
		if each.GetProfile().GetFingerprint() == v.GetProfile().GetFingerprint() {
			return each
		}
	}
	s.t.Errorf("%v is gone", v)
	return v
}

// phases returns the phases of all versions by their numbers.
func (s *site) phases() map[int64]string {
	s.t.Helper()
	list, err := s.server.ListProfiles(s.ctx, &recoveryv1.ListProfilesRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	out := map[int64]string{}
	for _, v := range list.GetItems() {
		out[v.GetProfile().GetVersion()] = names.Of(v.GetPhase())
	}
	return out
}

// reports has a new node report a fingerprint.
func (s *site) reports(fingerprint string) string {
	s.t.Helper()
	node := ids.New()
	s.exec(`INSERT INTO recovery.identity (node_id, name, state, state_by, state_reason, state_at, created_at, version)
		VALUES ($1::uuid, $1::uuid::text, 'pending', 'test', '', mesh.clock(), mesh.clock(), 0)`, node)
	s.exec(`INSERT INTO recovery.judgement (node_id, identity_state, generation, session_version, due_at)
		VALUES ($1, 'active', 0, 0, mesh.clock())`, node)
	s.exec(`INSERT INTO recovery.node_profile (node_id, name, fingerprint, reported_at)
		VALUES ($1, 'site', $2, mesh.clock())`, node, fingerprint)
	return node
}

func (s *site) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.db.OwnerPool().Exec(s.ctx, sql, args...); err != nil {
		s.t.Fatal(err)
	}
}

// events returns how many events there are of changes of profiles.
func (s *site) events() int {
	s.t.Helper()
	return len(testkit.Events(s.t, s.db.Pool(pg.RoleRecovery), `kind = 'profile.changed'`))
}

func wants(t *testing.T, err error, want commonv1.Reason) {
	t.Helper()
	if !fault.Has(err, want) {
		t.Errorf("%v, want %s", err, names.Of(want))
	}
}

// content is a content of the default profile, as a replica is configured with it.
func content(api string, roots []byte) *commonv1.Profile {
	p := &commonv1.Profile{
		Name: "site", ApiUrl: api, RecoveryUrl: "https://127.0.0.1:2", CaBundlePem: roots, RecoveryCaBundlePem: roots,
	}
	p.Fingerprint = profiles.Fingerprint(p)
	return p
}
