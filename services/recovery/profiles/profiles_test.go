package profiles_test

import (
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/services/recovery/profiles"
)

func tlsServer(raw net.Conn, cfg *tls.Config) *tls.Conn { return tls.Server(raw, cfg) }

// TestAVersionGoesThroughItsPhases checks what each verb does, and what the book and replicas of nodeapi know.
func TestAVersionGoesThroughItsPhases(t *testing.T) {
	s := newSite(t)
	if err := s.book.Configure(s.ctx, content("127.0.0.1:1", s.authorities.ServiceRoots.PEM())); err != nil {
		t.Fatal(err)
	}
	two := s.set()
	if two.GetProfile().GetVersion() != 2 || two.GetBy() != "ann" || !two.GetDefaultName() {
		t.Fatalf("%v", two)
	}
	if diff := cmp.Diff(map[int64]string{1: "active", 2: "announced"}, s.phases()); diff != "" {
		t.Fatal(diff)
	}
	if offered := s.book.Default().GetVersion(); offered != 1 {
		t.Errorf("version %d is given while another is announced", offered)
	}
	checkAuthority(t, s.book, map[int64][2]bool{1: {false, true}, 2: {true, false}})
	three := s.set() // in place of the other that was announced
	if diff := cmp.Diff(map[int64]string{1: "active", 2: "retiring", 3: "announced"}, s.phases()); diff != "" {
		t.Fatal(diff)
	}
	if err := activate(s.ctx, s.server, three); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[int64]string{1: "retiring", 2: "retiring", 3: "active"}, s.phases()); diff != "" {
		t.Fatal(diff)
	}
	if offered := s.book.Default(); offered.GetVersion() != 3 ||
		offered.GetFingerprint() != three.GetProfile().GetFingerprint() {
		t.Errorf("version %d is given", offered.GetVersion())
	}
	checkAuthority(t, s.book, map[int64][2]bool{1: {}, 2: {}, 3: {true, true}})
	wants(t, s.retire(three, true), commonv1.Reason_REASON_PROFILE_IN_USE)
	s.reports(two.GetProfile().GetFingerprint())
	wants(t, s.retire(two, false), commonv1.Reason_REASON_PROFILE_IN_USE)
	list, err := s.server.ListProfiles(s.ctx, &recoveryv1.ListProfilesRequest{Name: "site"})
	if err != nil || list.GetItems()[1].GetNodes() != 1 || list.GetItems()[0].GetNodes() != 0 {
		t.Errorf("%v %v", list, err)
	}
	if err := s.retire(two, true); err != nil {
		t.Fatal(err)
	}
	wants(t, activate(s.ctx, s.server, two), commonv1.Reason_REASON_PRECONDITION_FAILED)
	if names := s.book.Names(); !slices.Equal(names, []string{"site"}) {
		t.Errorf("names %v", names)
	}
	checkAuthority(t, s.book, map[int64][2]bool{1: {}, 3: {true, true}})
	_, err = s.book.Active(s.ctx, "elsewhere")
	wants(t, err, commonv1.Reason_REASON_PROFILE_UNKNOWN)
	wants(t, activate(s.ctx, s.server, &recoveryv1.ProfileVersion{Profile: &commonv1.Profile{Name: "site", Version: 9}}),
		commonv1.Reason_REASON_PROFILE_UNKNOWN)
	// The same content again is the same row above all others, and a stale sight of the row is refused.
	again, err := s.server.SetProfile(s.ctx, s.request(two.GetProfile().GetTerminalUrl()))
	if err != nil || again.GetProfile().GetProfile().GetVersion() != 4 ||
		again.GetProfile().GetProfile().GetFingerprint() != two.GetProfile().GetFingerprint() ||
		again.GetProfile().GetPhase() != recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED {
		t.Fatalf("%v %v", again, err)
	}
	_, err = s.server.ActivateProfile(s.ctx, &recoveryv1.ActivateProfileRequest{
		Name: "site", Version: 4, Reason: "late", RowSeen: two.GetVersion(),
	})
	wants(t, err, commonv1.Reason_REASON_CONFLICT)
	stale := s.request(endpoint(t, s.authorities, "nodeapi"))
	stale.NewestSeen = 2
	_, err = s.server.SetProfile(s.ctx, stale)
	wants(t, err, commonv1.Reason_REASON_CONFLICT)
}

// TestAFormerContentIsOfferedAboveTheOneThatNodesTook goes back in each way: agents take a version only if its number
// is above that of theirs.
func TestAFormerContentIsOfferedAboveTheOneThatNodesTook(t *testing.T) {
	for name, back := range map[string]func(s *site, first, second *recoveryv1.ProfileVersion) error{
		"activated again": func(s *site, first, second *recoveryv1.ProfileVersion) error {
			if err := activate(s.ctx, s.server, second); err != nil {
				return err
			}
			return activate(s.ctx, s.server, s.now(first))
		},
		"set while another is announced": func(s *site, first, _ *recoveryv1.ProfileVersion) error {
			_, err := s.server.SetProfile(s.ctx, s.request(first.GetProfile().GetTerminalUrl()))
			return err
		},
		"the announced one retired": func(s *site, _, second *recoveryv1.ProfileVersion) error {
			return s.retire(second, true)
		},
		"configured again": func(s *site, first, second *recoveryv1.ProfileVersion) error {
			if err := activate(s.ctx, s.server, second); err != nil {
				return err
			}
			return s.book.Configure(s.ctx, first.GetProfile())
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			first := s.set()
			if err := activate(s.ctx, s.server, first); err != nil {
				t.Fatal(err)
			}
			second := s.set()
			s.reports(second.GetProfile().GetFingerprint())
			if err := back(s, first, second); err != nil {
				t.Fatal(err)
			}
			for _, p := range s.book.Authority().GetProfiles() {
				if p.GetOffered() && (p.GetProfile().GetFingerprint() != first.GetProfile().GetFingerprint() ||
					p.GetProfile().GetVersion() <= second.GetProfile().GetVersion()) {
					t.Errorf("offered: %v", p)
				}
			}
			if offered := s.book.Default(); offered.GetFingerprint() != first.GetProfile().GetFingerprint() {
				t.Errorf("active: %v", offered)
			}
		})
	}
}

// TestTrustIsBounded: all of it goes to each replica of nodeapi in one message, without which no replica has a view.
func TestTrustIsBounded(t *testing.T) {
	s := newSite(t)
	s.exec(`INSERT INTO recovery.profile (profile_id, name, number, fingerprint, api_url, recovery_url, terminal_url,
			ca_bundle, recovery_ca_bundle, phase, phase_by, phase_reason)
		SELECT gen_random_uuid(), 'site-' || n, 1, n::text, '', '', '', convert_to(repeat('x', 262144), 'UTF8'),
			convert_to(repeat('x', 262144), 'UTF8'), 'active', 'test', '' FROM generate_series(1, 8) n`)
	_, err := s.server.SetProfile(s.ctx, s.request(""))
	wants(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	if denial, _ := fault.As(err); denial == nil || denial.Remedy == "" {
		t.Errorf("%v", err)
	}
	s.exec(`UPDATE recovery.profile SET phase = 'retiring' WHERE name = 'site-1'`)
	if _, err := s.server.SetProfile(s.ctx, s.request("")); err != nil {
		t.Error(err)
	}
}

// TestVersionsStandAboveThoseOfALostHistory: nodes remember the numbers of their versions, and the database may have
// lost them. A version that is set then is above them all, also if its content is the active one.
func TestVersionsStandAboveThoseOfALostHistory(t *testing.T) {
	s := newSite(t)
	first := s.set()
	if err := activate(s.ctx, s.server, first); err != nil {
		t.Fatal(err)
	}
	s.exec(`UPDATE mesh.era SET era = era + 1, reason = 'restored'`)
	again, err := s.server.SetProfile(s.ctx, s.request(first.GetProfile().GetTerminalUrl()))
	if err != nil || again.GetProfile().GetProfile().GetVersion() < 1<<40 ||
		again.GetProfile().GetPhase() != recoveryv1.ProfilePhase_PROFILE_PHASE_ACTIVE {
		t.Errorf("%v %v", again, err)
	}
	if second := s.set(); second.GetProfile().GetVersion() <= again.GetProfile().GetProfile().GetVersion() {
		t.Errorf("%v", second)
	}
}

// checkAuthority compares what replicas of nodeapi are sent with {offered, active} by the number of the version. A
// version that is not offered is sent without its trust.
func checkAuthority(t *testing.T, book *profiles.Book, want map[int64][2]bool) {
	t.Helper()
	got := map[int64][2]bool{}
	for _, p := range book.Authority().GetProfiles() {
		got[p.GetProfile().GetVersion()] = [2]bool{p.GetOffered(), p.GetActive()}
		if whole := len(p.GetProfile().GetCaBundlePem()) > 0; whole != p.GetOffered() {
			t.Errorf("version %d is sent with its trust: %v", p.GetProfile().GetVersion(), whole)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestAProfileIsVerifiedBeforeItIsAnnounced checks each endpoint that is not what the profile's trust says.
func TestAProfileIsVerifiedBeforeItIsAnnounced(t *testing.T) {
	s := newSite(t)
	other := rpctest.NewAuthorities(t)
	foreign := other.ServiceRoots.PEM()
	for name, tt := range map[string]struct {
		change func(*recoveryv1.SetProfileRequest)
		want   commonv1.Reason
	}{
		"trust of another mesh": {func(r *recoveryv1.SetProfileRequest) { r.CaBundlePem = foreign }, unverified},
		"recovery trust of another mesh": {
			func(r *recoveryv1.SetProfileRequest) { r.RecoveryCaBundlePem = foreign }, unverified,
		},
		"node API of another mesh": {
			func(r *recoveryv1.SetProfileRequest) { r.ApiUrl = endpoint(t, other, "nodeapi") }, unverified,
		},
		"another service": {
			func(r *recoveryv1.SetProfileRequest) { r.ApiUrl = s.recovery }, unverified,
		},
		"recovery at another service": {
			func(r *recoveryv1.SetProfileRequest) { r.RecoveryUrl = "https://" + s.api }, unverified,
		},
		"nothing listens": {
			func(r *recoveryv1.SetProfileRequest) { r.RecoveryUrl = "https://127.0.0.1:1" }, unverified,
		},
		"terminal of another mesh": {
			func(r *recoveryv1.SetProfileRequest) { r.TerminalUrl = endpoint(t, other, "nodeapi") }, unverified,
		},
		"no address":  {func(r *recoveryv1.SetProfileRequest) { r.ApiUrl = "127.0.0.1:1:1" }, invalid},
		"plain http":  {func(r *recoveryv1.SetProfileRequest) { r.RecoveryUrl = "http://" + s.recovery }, invalid},
		"no trust":    {func(r *recoveryv1.SetProfileRequest) { r.CaBundlePem = []byte("none") }, invalid},
		"no name":     {func(r *recoveryv1.SetProfileRequest) { r.Name = "Site One" }, invalid},
		"no reason":   {func(r *recoveryv1.SetProfileRequest) { r.Reason = " " }, commonv1.Reason_REASON_REASON_REQUIRED},
		"all is well": {func(*recoveryv1.SetProfileRequest) {}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			req := proto.CloneOf(s.request(""))
			tt.change(req)
			before := s.events()
			_, err := s.server.SetProfile(s.ctx, req)
			switch {
			case tt.want == 0 && err != nil:
				t.Fatal(err)
			case tt.want != 0:
				wants(t, err, tt.want)
				if s.events() != before {
					t.Error("a refusal has changed a profile")
				}
			}
			if denial, _ := fault.As(err); tt.want == unverified && len(denial.Unmet) != 1 &&
				name != "trust of another mesh" {
				t.Errorf("unmet: %v", denial.Unmet)
			}
		})
	}
	if diff := cmp.Diff(map[int64]string{1: "announced"}, s.phases()); diff != "" {
		t.Error(diff)
	}
}

const (
	unverified = commonv1.Reason_REASON_PROFILE_UNVERIFIED
	invalid    = commonv1.Reason_REASON_INVALID_ARGUMENT
)

// TestOneVersionIsActive has two replicas activate different versions at once, many times over.
func TestOneVersionIsActive(t *testing.T) {
	s := newSite(t)
	var versions []*recoveryv1.ProfileVersion
	for range 4 {
		versions = append(versions, s.set())
	}
	_, second := s.replica()
	for range 5 {
		var wg sync.WaitGroup
		for i, v := range versions {
			by := s.server
			if i%2 == 1 {
				by = second
			}
			wg.Go(func() {
				// Another activation may give the version another number before its own comes.
				err := activate(s.ctx, by, s.now(v))
				for fault.Has(err, commonv1.Reason_REASON_PROFILE_UNKNOWN) {
					err = activate(s.ctx, by, s.now(v))
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		active := 0
		for _, phase := range s.phases() {
			if phase == "active" {
				active++
			}
		}
		if active != 1 {
			t.Fatalf("%d versions are active: %v", active, s.phases())
		}
	}
	// The database holds it whatever the code does.
	_, err := s.db.OwnerPool().Exec(s.ctx, `UPDATE recovery.profile SET phase = 'active'`)
	if !pg.IsUnique(err, "profile_active") {
		t.Errorf("%v", err)
	}
	// Each change of a row has one event, with the version of the row.
	var twice int
	if err := s.db.OwnerPool().QueryRow(s.ctx, `SELECT count(*) FROM (SELECT FROM events.event
		WHERE kind = 'profile.changed' GROUP BY aggregate_id, aggregate_version HAVING count(*) > 1) x`).
		Scan(&twice); err != nil || twice != 0 {
		t.Errorf("%d versions of rows have two events, %v", twice, err)
	}
}

// configured is a content that a replica is configured with, whose endpoints its trust verifies if it has the roots of
// the mesh. Each has a terminal endpoint of its own.
func (s *site) configured(roots []byte) *commonv1.Profile {
	s.t.Helper()
	p := content(s.api, roots)
	p.RecoveryUrl, p.TerminalUrl = "https://"+s.recovery, endpoint(s.t, s.authorities, "nodeapi")
	p.Fingerprint = profiles.Fingerprint(p)
	return p
}

// TestAConfiguredProfileWithForeignTrust changes nothing, however often it is tried, and shows until the configuration
// has trust that verifies its endpoints, or the former content again.
func TestAConfiguredProfileWithForeignTrust(t *testing.T) {
	s := newSite(t)
	roots, foreign := s.authorities.ServiceRoots.PEM(), rpctest.NewAuthorities(t).ServiceRoots.PEM()
	first := content("127.0.0.1:1", roots) // nothing listens at the first start
	if err := s.book.Configure(s.ctx, first); err != nil {
		t.Fatal(err)
	}
	before := s.events()
	refused := func() {
		t.Helper()
		wrong := s.configured(foreign)
		for range 2 {
			wants(t, s.book.Configure(s.ctx, wrong), commonv1.Reason_REASON_PROFILE_UNVERIFIED)
		}
		wants(t, s.book.Configured(s.ctx), commonv1.Reason_REASON_PROFILE_UNVERIFIED)
		f, _ := fault.As(s.book.Configured(s.ctx))
		for _, want := range []string{wrong.GetName(), s.api, "does not verify it"} {
			if !strings.Contains(f.Public, want) {
				t.Errorf("the health does not name %s: %s", want, f.Public)
			}
		}
		if !strings.Contains(f.Remedy, "configuration") {
			t.Errorf("the next action is %q", f.Remedy)
		}
	}
	refused()
	if diff := cmp.Diff(map[int64]string{1: "active"}, s.phases()); diff != "" || s.events() != before ||
		s.book.Default().GetFingerprint() != first.GetFingerprint() {
		t.Fatalf("%d events, were %d: %s", s.events(), before, diff)
	}
	if err := s.book.Configure(s.ctx, first); err != nil || s.book.Configured(s.ctx) != nil {
		t.Errorf("the former content again: %v, %v", err, s.book.Configured(s.ctx))
	}
	refused()
	good := s.configured(roots)
	s.exec(`ALTER TABLE recovery.profile ADD CONSTRAINT refuse CHECK (false) NOT VALID`)
	if err := s.book.Configure(s.ctx, good); err == nil || s.book.Configured(s.ctx) == nil {
		t.Errorf("verified and not written: %v, %v", err, s.book.Configured(s.ctx))
	}
	s.exec(`ALTER TABLE recovery.profile DROP CONSTRAINT refuse`)
	if err := s.book.Configure(s.ctx, good); err != nil || s.book.Configured(s.ctx) != nil {
		t.Fatalf("with trust of its own: %v, %v", err, s.book.Configured(s.ctx))
	}
	if diff := cmp.Diff(map[int64]string{1: "retiring", 2: "active"}, s.phases()); diff != "" ||
		s.book.Default().GetFingerprint() != good.GetFingerprint() {
		t.Error(diff)
	}
	families, err := s.metrics.Gather()
	if err != nil || len(families) != 1 || families[0].GetName() != "profile_unverified_total" ||
		families[0].GetMetric()[0].GetCounter().GetValue() != 4 {
		t.Errorf("metrics %v, %v", families, err)
	}
}

// TestTheConfiguredProfile checks that a configuration is taken once, by whichever replica, and takes back nothing
// that a person has decided since.
func TestTheConfiguredProfile(t *testing.T) {
	s := newSite(t)
	roots := s.authorities.ServiceRoots.PEM()
	first, second := content("127.0.0.1:1", roots), s.configured(roots)
	other, _ := s.replica()
	var wg sync.WaitGroup
	for _, book := range []*profiles.Book{s.book, other} {
		wg.Go(func() {
			if err := book.Configure(s.ctx, first); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if diff := cmp.Diff(map[int64]string{1: "active"}, s.phases()); diff != "" {
		t.Fatal(diff)
	}
	two := s.set()
	if err := activate(s.ctx, s.server, two); err != nil {
		t.Fatal(err)
	}
	if err := other.Configure(s.ctx, first); err != nil { // it starts again
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[int64]string{1: "retiring", 2: "active"}, s.phases()); diff != "" {
		t.Fatal(diff)
	}
	if other.Default().GetVersion() != 2 {
		t.Error("the other replica does not know the active version")
	}
	if err := s.book.Configure(s.ctx, second); err != nil { // its file has changed
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[int64]string{1: "retiring", 2: "retiring", 3: "active"}, s.phases()); diff != "" {
		t.Fatal(diff)
	}
	// Profiles that configurations have left behind are retired after a month, if no node reports them, and cut a term
	// later.
	s.exec(`UPDATE recovery.profile SET phase_at = mesh.clock() - interval '31 days', phase_by = 'recovery'`)
	s.reports(first.GetFingerprint())
	if err := s.book.Configure(s.ctx, s.configured(roots)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[int64]string{1: "retiring", 2: "retired", 3: "retiring", 4: "active"},
		s.phases()); diff != "" {
		t.Fatal(diff)
	}
	cut := func() {
		t.Helper()
		if _, err := s.db.Pool(pg.RoleRecovery).Exec(s.ctx,
			`SELECT recovery.cut_profiles(interval '-1 second', '00000000-0000-0000-0000-000000000000', 500)`); err != nil {
			t.Fatal(err)
		}
	}
	s.reports(two.GetProfile().GetFingerprint())
	cut()
	if len(s.phases()) != 4 {
		t.Error("a retired version that a node reports was cut")
	}
	s.exec(`DELETE FROM recovery.node_profile`)
	cut()
	if diff := cmp.Diff(map[int64]string{1: "retiring", 3: "retiring", 4: "active"}, s.phases()); diff != "" {
		t.Error(diff)
	}
	if five := s.set(); five.GetProfile().GetVersion() != 5 {
		t.Errorf("a number was given twice: %v", five)
	}
}

// Scenario: a version is replaced, and an endpoint of it is given up. It does not become active again, and no version
// changes its phase; nor does one that was announced before its endpoint went.
func TestAVersionIsVerifiedBeforeItIsActivated(t *testing.T) {
	s := newSite(t)
	set := func(terminal string) *recoveryv1.ProfileVersion {
		t.Helper()
		out, err := s.server.SetProfile(s.ctx, s.request(terminal))
		if err != nil {
			t.Fatal(err)
		}
		return out.GetProfile()
	}
	terminal, end := endpointUntil(t, s.authorities, "nodeapi")
	first := set(terminal)
	if err := activate(s.ctx, s.server, first); err != nil {
		t.Fatal(err)
	}
	second := s.set()
	if err := activate(s.ctx, s.server, second); err != nil {
		t.Fatal(err)
	}
	next, endNext := endpointUntil(t, s.authorities, "nodeapi")
	third := set(next)
	end()
	endNext()
	before := s.events()
	for _, v := range []*recoveryv1.ProfileVersion{first, third} {
		err := activate(s.ctx, s.server, s.now(v))
		wants(t, err, commonv1.Reason_REASON_PROFILE_UNVERIFIED)
		if denial, _ := fault.As(err); len(denial.Unmet) != 1 || !strings.HasPrefix(denial.Unmet[0], "terminal_url: ") {
			t.Errorf("unmet: %v", denial.Unmet)
		}
	}
	if s.events() != before {
		t.Error("a refusal has changed a profile")
	}
	if err := activate(s.ctx, s.server, s.now(second)); err != nil {
		t.Errorf("the active one: %v", err)
	}
}

// TestAListHasFewBundles: a list of all profiles has none, and one of a name those of all its valid versions, up to 4
// MiB of the active one and of the newest.
func TestAListHasFewBundles(t *testing.T) {
	s := newSite(t)
	if _, err := s.db.OwnerPool().Exec(s.ctx, `
		INSERT INTO recovery.profile (profile_id, name, number, fingerprint, api_url, recovery_url, terminal_url,
			ca_bundle, recovery_ca_bundle, phase, phase_by, phase_reason)
		SELECT gen_random_uuid(), 'site', i, 'f' || i, '', '', '', convert_to('api ' || i, 'UTF8'),
			convert_to('recovery ' || i, 'UTF8'),
			CASE WHEN i = 1 THEN 'active' WHEN i > 28 THEN 'retired' ELSE 'retiring' END, '', ''
		FROM generate_series(1, 30) i`); err != nil {
		t.Fatal(err)
	}
	with := func(name string) map[int64]bool {
		t.Helper()
		list, err := s.server.ListProfiles(s.ctx, &recoveryv1.ListProfilesRequest{Name: name})
		if err != nil || len(list.GetItems()) != 30 {
			t.Fatalf("%d versions: %v", len(list.GetItems()), err)
		}
		out := map[int64]bool{}
		for _, v := range list.GetItems() {
			p := v.GetProfile()
			if len(p.GetCaBundlePem())+len(p.GetRecoveryCaBundlePem()) > 0 {
				out[p.GetVersion()] = true
			}
			if out[p.GetVersion()] &&
				(strings.TrimSpace(string(p.GetCaBundlePem())) != fmt.Sprintf("api %d", p.GetVersion()) ||
					strings.TrimSpace(string(p.GetRecoveryCaBundlePem())) != fmt.Sprintf("recovery %d", p.GetVersion())) {
				t.Errorf("version %d has other bundles: %v", p.GetVersion(), p)
			}
			if p.GetFingerprint() == "" {
				t.Errorf("version %d has no fingerprint", p.GetVersion())
			}
		}
		return out
	}
	if got := with(""); len(got) != 0 {
		t.Errorf("a list of all has the bundles of %v", got)
	}
	if got := with("site"); len(got) != 28 || got[29] || got[30] {
		t.Errorf("a list of one name has the bundles of %v", got)
	}
	if _, err := s.db.OwnerPool().Exec(s.ctx, `UPDATE recovery.profile SET
		ca_bundle = convert_to(rpad('api ' || number, 256 << 10), 'UTF8'),
		recovery_ca_bundle = convert_to(rpad('recovery ' || number, 256 << 10), 'UTF8')`); err != nil {
		t.Fatal(err)
	}
	if got := with("site"); len(got) != 8 || !got[1] || !got[28] || !got[22] || got[29] || got[21] {
		t.Errorf("a list of one name has the bundles of %v", got)
	}
}
