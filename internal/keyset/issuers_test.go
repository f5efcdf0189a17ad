package keyset

import (
	"context"
	"crypto/x509"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
)

// certified is a replica with a certificate.
type certified struct {
	*unit

	certs *Certificates
	dir   string
}

func newIssuer(t *testing.T) *ca.ServiceCA {
	t.Helper()
	services, err := ca.OpenServiceCA(t.TempDir(), "mesh.test")
	if err != nil {
		t.Fatal(err)
	}
	return services
}

func issue(t *testing.T, services *ca.ServiceCA, service string) string {
	t.Helper()
	dir := t.TempDir()
	if err := services.IssueToDir(service, dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	return dir
}

// certified starts a replica with the files of a directory.
func (b *bench) certified(service, dir string) (*certified, error) {
	b.t.Helper()
	identity := filepath.Join(dir, pki.IdentityFile)
	store, err := pki.LoadStore(identity, identity)
	if err != nil {
		b.t.Fatal(err)
	}
	roots, err := pki.LoadBundle(filepath.Join(dir, pki.BundleFile))
	if err != nil {
		b.t.Fatal(err)
	}
	c := &certified{unit: &unit{id: ids.New()}, certs: &Certificates{Store: store, Roots: roots}, dir: dir}
	c.Set, err = Open(b.ctx, Deps{
		Logger: testkit.Logger(b.t), Pool: b.db.Pool(service), Wake: &events.Signal{}, Service: service, ReplicaID: c.id,
		Certificates: c.certs,
	})
	return c, err
}

func (c *certified) trusts() []string {
	ids := c.certs.Roots.Roots()
	var out []string
	for _, root := range ids {
		out = append(out, pki.RootID(root))
	}
	slices.Sort(out)
	return out
}

// issuer returns the root of the certificate that the replica presents.
func (c *certified) issuer(t *testing.T, all ...*x509.Certificate) string {
	t.Helper()
	chain, err := c.certs.Store.Chain()
	if err != nil {
		t.Fatal(err)
	}
	root, err := pki.Anchor(chain, all)
	if err != nil {
		t.Fatal(err)
	}
	return pki.RootID(root)
}

func (b *bench) askServices(key string) error {
	return pg.InTx(b.ctx, b.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := Ask(ctx, tx, Request{Kind: Services, IdempotencyKey: key, By: "ada", Reason: "yearly"})
		return err
	})
}

// TestAnIssuerOfServicesIsFollowedByAnother: the file of one service gets the next issuer; all replicas trust it before
// one of its certificates is presented, and the former issuer is retired when no certificate of it is presented. A
// client that trusts only the first issuer reaches the services throughout.
func TestAnIssuerOfServicesIsFollowedByAnother(t *testing.T) {
	b := newBench(t)
	services := newIssuer(t)
	first := services.Root()
	late := issue(t, services, "readmodel")
	start := func(service string) *certified {
		c, err := b.certified(service, issue(t, services, service))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	lifecycle, nodeapi, recovery := start(pg.RoleLifecycle), start(pg.RoleNodeAPI), start(pg.RoleRecovery)
	all := []*certified{lifecycle, nodeapi, recovery}
	round := func(which ...*certified) {
		t.Helper()
		for _, c := range which {
			c.issuers.part.retired = time.Time{}
			b.round(c.unit)
		}
	}
	later := func(by time.Duration) {
		t.Helper()
		b.later(by)
		round(all...)
		round(all...)
	}
	round(all...)
	b.want("signing")
	if err := b.askServices("one"); err != nil {
		t.Fatal(err)
	}
	if err := b.askServices("two"); err != nil {
		t.Errorf("asked again before the issuer is there: %v", err)
	}
	round(all...)
	for _, c := range all {
		if c.busy() {
			t.Errorf("%s reads the set at each poll while a request waits for a file", c.deps.Service)
		}
	}
	b.want("signing")

	if err := services.Next(); err != nil {
		t.Fatal(err)
	}
	next, both := pki.RootID(services.Root()), []*x509.Certificate{first, services.Root()}
	write := func(c *certified, leaf bool) {
		t.Helper()
		if err := pki.WriteFile(filepath.Join(c.dir, pki.BundleFile), pki.EncodeCertificates(services.Roots())); err != nil {
			t.Fatal(err)
		}
		if !leaf {
			return
		}
		if err := services.IssueToDir(c.deps.Service, c.dir, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	write(lifecycle, false)
	write(nodeapi, true) // too early
	round(lifecycle, nodeapi)
	b.want("signing verify_only")
	if got := nodeapi.issuer(t, both...); got == next {
		t.Error("a certificate is shown whose issuer is not trusted by all")
	}
	if !slices.ContainsFunc(nodeapi.problems,
		func(p string) bool { return strings.Contains(p, "is not trusted by all yet") }) {
		t.Errorf("problems: %q", nodeapi.problems)
	}
	b.later(leastAge)
	round(lifecycle)
	b.want("signing verify_only") // recovery has not read it
	later(0)
	b.want("verifying_after signing")
	for _, c := range all {
		if got := c.trusts(); len(got) != 2 {
			t.Errorf("%s trusts %q", c.deps.Service, got)
		}
	}
	if got := nodeapi.issuer(t, both...); got != next || len(nodeapi.problems) > 0 {
		t.Errorf("nodeapi shows a certificate of %s, problems %q", got, nodeapi.problems)
	}
	// An agent, or a person, that trusts only the first issuer.
	old := x509.VerifyOptions{
		Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	old.Roots.AddCert(first)
	shown, err := pki.ParseChain(nodeapi.certs.Store.Certificate().Certificate)
	if err != nil {
		t.Fatal(err)
	}
	for _, cert := range shown[1:] {
		old.Intermediates.AddCert(cert)
	}
	if _, err := shown[0].Verify(old); err != nil {
		t.Errorf("who knows the first issuer alone: %v", err)
	}

	later(Services.Overlap() + time.Second)
	b.want("verifying_after signing") // lifecycle and recovery present certificates of the first
	write(lifecycle, true)
	write(recovery, true)
	later(time.Second)
	later(retireEvery)
	b.want("retired signing")
	for _, c := range all {
		round(c)
		if got := c.trusts(); !slices.Equal(got, []string{next}) {
			t.Errorf("%s trusts %q after the first was retired", c.deps.Service, got)
		}
	}

	// A replica with a certificate of the retired issuer does not start; nor does one with a certificate of another mesh.
	for name, dir := range map[string]string{
		"of the first issuer": late,
		"of another mesh":     issue(t, newIssuer(t), "readmodel"),
	} {
		if _, err := b.certified(pg.RoleReadmodel, dir); !fault.Has(err, commonv1.Reason_REASON_SIGNING_KEYS_DIFFER) {
			t.Errorf("a replica with a certificate %s: %v", name, err)
		}
	}
	// A replica whose file of issuers has only the first one learns the next from the set.
	if err := services.IssueToDir("readmodel", late, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := pki.WriteFile(filepath.Join(late, pki.BundleFile),
		pki.EncodeCertificates([]*x509.Certificate{first})); err != nil {
		t.Fatal(err)
	}
	c, err := b.certified(pg.RoleReadmodel, late)
	if err != nil || !slices.Equal(c.trusts(), []string{next}) {
		t.Errorf("a replica with a file of the first issuer: %v", err)
	}
}

// TestAnIssuerTakenOutOfTheFileIsTrustedNoLonger: an issuer that is removed from the file is trusted neither because it
// was before, nor by a cross certificate of an earlier issuer.
func TestAnIssuerTakenOutOfTheFileIsTrustedNoLonger(t *testing.T) {
	services := newIssuer(t)
	for range 2 {
		if err := services.Next(); err != nil {
			t.Fatal(err)
		}
	}
	full, err := services.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	roots, crosses := full.Given()
	states := func(states ...string) []Key {
		var rows []Key
		for at, state := range states {
			row := Key{Kind: Services, KeyID: pki.RootID(roots[at]), PublicKey: roots[at].Raw, State: state}
			if at > 0 {
				row.Endorsement = crosses[at-1].Raw
			}
			rows = append(rows, row)
		}
		return rows
	}
	use := states(VerifyingAfter, VerifyingAfter, Signing)
	for name, test := range map[string]struct {
		rows        []Key
		given, want []int
	}{
		"all":                         {use, []int{0, 1, 2}, []int{0, 1, 2}},
		"the first is taken out":      {use, []int{1, 2}, []int{1, 2}},
		"the middle one is taken out": {use, []int{0, 2}, []int{0, 2}},
		"the first alone":             {use, []int{0}, []int{0, 1, 2}},
		"the middle one alone":        {use, []int{1}, []int{1, 2}},
		"the next does not sign yet":  {states(VerifyingAfter, Signing, VerifyOnly), []int{0, 2}, []int{0, 1, 2}},
		"the first is retired":        {states(Retired, VerifyingAfter, Signing), []int{0}, []int{1, 2}},
	} {
		bundle, err := pki.NewBundle(roots...)
		if err != nil {
			t.Fatal(err)
		}
		i := newIssuers(&Certificates{Roots: bundle}, pg.RoleNodeAPI)
		i.rows.Store(&test.rows)
		if err := bundle.Follow(i.trusted); err != nil {
			t.Fatal(err)
		}
		var given []*x509.Certificate
		for _, at := range test.given {
			given = append(given, roots[at])
		}
		if err := bundle.Set(given...); err != nil {
			t.Fatal(err)
		}
		var got []int
		for at, root := range roots {
			if slices.ContainsFunc(bundle.Roots(), root.Equal) {
				got = append(got, at)
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: with %v in the file it trusts %v, want %v", name, test.given, got, test.want)
		}
	}
}

// TestReplicasOfTwoIssuersStart: a mesh whose files of issuers have two, and whose services have certificates of
// either, starts with a new set, which gets the second issuer when a certificate of it is presented.
func TestReplicasOfTwoIssuersStart(t *testing.T) {
	b := newBench(t)
	one, two := newIssuer(t), newIssuer(t)
	start := func(service string, services *ca.ServiceCA) *certified {
		t.Helper()
		dir := issue(t, services, service)
		both := pki.EncodeCertificates([]*x509.Certificate{one.Root(), two.Root()})
		if err := pki.WriteFile(filepath.Join(dir, pki.BundleFile), both); err != nil {
			t.Fatal(err)
		}
		c, err := b.certified(service, dir)
		if err != nil {
			t.Fatalf("%s does not start: %v", service, err)
		}
		return c
	}
	lifecycle, nodeapi := start(pg.RoleLifecycle, one), start(pg.RoleNodeAPI, two)
	if len(nodeapi.problems) != 1 || !strings.Contains(nodeapi.problems[0], pki.RootID(two.Root())) {
		t.Errorf("problems of nodeapi: %q, want one about its issuer", nodeapi.problems)
	}
	b.want("signing")
	b.round(lifecycle.unit)
	b.round(nodeapi.unit)
	b.want("signing verify_only")
	recovery := start(pg.RoleRecovery, two)
	b.later(leastAge)
	for range 2 {
		for _, c := range []*certified{recovery, nodeapi, lifecycle} {
			b.round(c.unit)
		}
	}
	b.want("verifying_after signing")
	for _, c := range []*certified{lifecycle, nodeapi, recovery} {
		b.round(c.unit)
		if len(c.problems) > 0 {
			t.Errorf("problems of %s after its issuer signs: %q", c.deps.Service, c.problems)
		}
	}
}

// TestARequestTakesTheIssuerThatIsVouchedFor checks that of several roots that the set lacks the next one is that with
// a cross certificate of the issuer that signs. A request for which no root came ends after a week.
func TestARequestTakesTheIssuerThatIsVouchedFor(t *testing.T) {
	b := newBench(t)
	services, other := newIssuer(t), newIssuer(t)
	lifecycle, err := b.certified(pg.RoleLifecycle, issue(t, services, pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	open := func() int {
		t.Helper()
		rows, err := pg.All[Rotation](b.ctx, b.db.Pool(pg.RoleLifecycle), readOpenRotations)
		if err != nil {
			t.Fatal(err)
		}
		return len(rows)
	}
	if err := b.askServices("one"); err != nil {
		t.Fatal(err)
	}
	if err := b.askServices("again"); err != nil {
		t.Fatal(err)
	}
	b.round(lifecycle.unit)
	if open() != 1 {
		t.Error("a request ended without an issuer")
	}
	testkit.SetClockOffset(b.db, requestEnds+time.Minute)
	lifecycle.now = func() time.Time { return time.Now().Add(requestEnds + time.Minute) }
	b.round(lifecycle.unit)
	if open() != 0 {
		t.Error("a request of a week ago is open")
	}
	reasons := testkit.Events(t, b.db.Pool(pg.RoleReadmodel), `payload->>'action' = 'key.request_ended'`)
	if len(reasons) != 1 {
		t.Errorf("the end of a request is %d entries of the audit log, want one", len(reasons))
	}
	// Both idempotency keys got the request that is over, and get it again.
	for _, key := range []string{"one", "again"} {
		if err := b.askServices(key); err != nil {
			t.Fatal(err)
		}
		if open() != 0 {
			t.Fatalf("the idempotency key %q asked for a further issuer", key)
		}
	}
	lifecycle.now = time.Now
	testkit.SetClockOffset(b.db, 0)
	if err := b.askServices("two"); err != nil {
		t.Fatal(err)
	}
	if err := services.Next(); err != nil {
		t.Fatal(err)
	}
	certs := append([]*x509.Certificate{other.Root()}, services.Roots()...)
	if err := pki.WriteFile(filepath.Join(lifecycle.dir, pki.BundleFile), pki.EncodeCertificates(certs)); err != nil {
		t.Fatal(err)
	}
	b.round(lifecycle.unit)
	rows, err := ReadKeys(b.ctx, b.db.Pool(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	if next := in(VerifyOnly, Services, rows); len(next) != 1 || next[0].KeyID != pki.RootID(services.Root()) ||
		open() != 0 {
		t.Errorf("next are %v, want %s", next, pki.RootID(services.Root()))
	}
}
