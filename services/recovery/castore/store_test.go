package castore_test

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/smallstep/certificates/db"
	"pgregory.net/rapid"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/castore"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const day = 24 * time.Hour

// authority is a real one with its own database, and the store over it.
type authority struct {
	t      *testing.T
	mesh   *testkit.Database
	signer *ca.Embedded
	store  *castore.Store
	admin  *pgxpool.Pool
}

func open(t *testing.T) *authority {
	t.Helper()
	testkit.IO(t)
	ctx := testkit.Context(t)
	a := &authority{t: t, mesh: testkit.DB(t)}
	dsn := testkit.DB(t).AdminURL()
	var err error
	if a.signer, err = ca.Open(ca.Config{Dir: t.TempDir(), TrustDomain: "mesh.test", DatabaseURL: dsn}); err != nil {
		t.Fatal(err)
	}
	if a.admin, err = pg.Open(ctx, pg.Config{URL: dsn}); err != nil {
		t.Fatal(err)
	}
	a.store = a.openAs(dsn)
	t.Cleanup(func() {
		a.dropRole()
		a.admin.Close()
		if err := a.signer.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

func (a *authority) openAs(dsn string) *castore.Store {
	a.t.Helper()
	store, err := castore.Open(a.t.Context(), dsn)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(store.Close)
	return store
}

// dropRole drops the role that a test has made, which belongs to the whole server.
func (a *authority) dropRole() {
	if _, err := a.admin.Exec(context.WithoutCancel(a.t.Context()), `DO $$
		DECLARE name text := 'mesh_ca_retention_' || oid FROM pg_database WHERE datname = current_database();
		BEGIN
			IF EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
				EXECUTE format('DROP OWNED BY %1$I CASCADE; DROP ROLE %1$I', name);
			END IF;
		END $$`); err != nil {
		a.t.Error(err)
	}
}

// sign has the authority sign a certificate for an hour.
func (a *authority) sign() {
	a.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		a.t.Fatal(err)
	}
	id := ids.New()
	csr, err := pki.NewCSR(key, pki.NodeID("mesh.test", id))
	if err != nil {
		a.t.Fatal(err)
	}
	if _, err := a.signer.Sign(a.t.Context(), ca.SignRequest{
		CSR: csr, NodeID: id, NodeInstanceID: ids.New(), Profile: "test", TTL: time.Hour,
	}); err != nil {
		a.t.Fatal(err)
	}
}

func (a *authority) put(table, key string, value []byte) {
	a.t.Helper()
	if _, err := a.admin.Exec(a.t.Context(), `INSERT INTO `+table+` (nkey, nvalue) VALUES ($1, $2)`, []byte(key),
		value); err != nil {
		a.t.Fatal(err)
	}
}

// keys returns the keys of a table in their order, without those of what the authority has signed itself.
func (a *authority) keys(table string) []string {
	a.t.Helper()
	rows, err := pgxRows(a.t.Context(), a.admin, `SELECT convert_from(nkey, 'UTF8') FROM `+table+` ORDER BY nkey`)
	if err != nil {
		a.t.Fatal(err)
	}
	return slices.DeleteFunc(rows, func(key string) bool { return len(key) > 24 })
}

func (a *authority) count(table string) int {
	a.t.Helper()
	var n int
	if err := a.admin.QueryRow(a.t.Context(), `SELECT count(*) FROM `+table).Scan(&n); err != nil {
		a.t.Fatal(err)
	}
	return n
}

// walk runs all cuts once, as recovery does.
func (a *authority) walk(store *castore.Store) error {
	a.t.Helper()
	pool := a.mesh.Pool(pg.RoleRecovery)
	source := policy.NewSource(policystore.Load(pool), testkit.Logger(a.t), policy.SourceConfig{Timeout: time.Minute})
	if err := source.Refresh(a.t.Context()); err != nil {
		a.t.Fatal(err)
	}
	walker, err := retention.New(retention.Deps{Logger: testkit.Logger(a.t), DB: pool, Policy: source}, store.Cuts()...)
	if err != nil {
		a.t.Fatal(err)
	}
	return walker.Walk(a.t.Context())
}

func pgxRows(ctx context.Context, db *pgxpool.Pool, sql string) ([]string, error) {
	rows, err := db.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, rows.Err()
}

// certificate returns a certificate that ends at a time, by an issuer whose name has so many bytes.
func certificate(t interface{ Fatal(args ...any) }, ends time.Time, issuer int) []byte {
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, 0, issuer/60+1)
	for range issuer/60 + 1 {
		names = append(names, strings.Repeat("i", 60))
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{OrganizationalUnit: names}, NotBefore: ends.Add(-time.Hour), NotAfter: ends,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func token(claims string) []byte {
	return []byte("eyJhbGciOiJFUzI1NiJ9." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2lnbmF0dXJl")
}

func (a *authority) revocation(serial string, ends time.Time) []byte {
	a.t.Helper()
	out, err := json.Marshal(db.RevokedCertificateInfo{
		Serial: serial, Reason: "test", RevokedAt: ends.Add(-time.Minute),
		ExpiresAt: ends,
	})
	if err != nil {
		a.t.Fatal(err)
	}
	return out
}

// fill writes rows that have expired, that have not, and that cannot be read, and has the authority write two.
func (a *authority) fill() {
	now := time.Now()
	for name, ends := range map[string]time.Time{
		"over": now.Add(-100 * day), "within the term": now.Add(-80 * day), "valid": now.Add(day),
	} {
		a.put("x509_certs", name, certificate(a.t, ends, 10))
		a.put("x509_certs_data", name, []byte(`{}`))
		a.put("used_ott", name, token(fmt.Sprintf(`{"sub":"%s","exp":%d}`, strings.Repeat("n", len(name)%4), ends.Unix())))
		a.put("revoked_x509_certs", name, a.revocation(name, ends))
	}
	a.put("x509_certs", "unreadable", []byte("0\x82"))
	a.put("used_ott", "without an end", token(`{}`))
	a.put("used_ott", "unreadable", []byte("none"))
	a.put("revoked_x509_certs", "without an end", a.revocation("x", time.Time{}))
	// Its certificate has not ended, though this row reports that it has.
	a.put("x509_certs", "said to be over", certificate(a.t, now.Add(day), 10))
	a.put("revoked_x509_certs", "said to be over", a.revocation("x", now.Add(-100*day)))
	a.put("x509_crl", "crl", []byte(`{"ExpiresAt":"2001-01-01T00:00:00Z"}`))
	a.sign()
	a.sign()
}

func TestWhatHasEndedIsCut(t *testing.T) {
	a := open(t)
	a.fill()
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{
		"x509_certs":         {"said to be over", "unreadable", "valid", "within the term"},
		"x509_certs_data":    {"valid", "within the term"},
		"used_ott":           {"unreadable", "valid", "within the term", "without an end"},
		"revoked_x509_certs": {"said to be over", "valid", "within the term", "without an end"},
		"x509_crl":           {"crl"},
	}
	got := map[string][]string{}
	for table := range want {
		got[table] = a.keys(table)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if certs, tokens := a.count("x509_certs"), a.count("used_ott"); certs != 4+2 || tokens != 4+2 {
		t.Errorf("%d certificates and %d tokens with the two that were signed", certs, tokens)
	}
	accounts, err := retention.Accounts(t.Context(), a.mesh.Pool(pg.RoleReadmodel))
	if err != nil {
		t.Fatal(err)
	}
	var shown []string
	for _, acc := range accounts {
		shown = append(shown, fmt.Sprintf("%s %s by %s: %d %s", acc.Service, acc.Cut, acc.Key, acc.Total, acc.Failure))
	}
	if diff := cmp.Diff([]string{
		"recovery authority_certificates by retention.authority_seconds: 1 ",
		"recovery authority_revocations by retention.authority_seconds: 1 ",
		"recovery authority_tokens by retention.authority_seconds: 1 ",
	}, shown); diff != "" {
		t.Error(diff)
	}
	a.sign() // the authority still signs
}

// TestTheTermIsThePolicys: rows that ended 80 days ago stay within the 90 days of the default, and are cut when the key
// says 60.
func TestTheTermIsThePolicys(t *testing.T) {
	a := open(t)
	a.fill()
	if err := policystore.Put(t.Context(), a.mesh.Pool(pg.RoleRecovery), policy.RetentionAuthoritySeconds, "5184000",
		"test", "test"); err != nil {
		t.Fatal(err)
	}
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	if got := a.keys("x509_certs"); slices.Contains(got, "within the term") || !slices.Contains(got, "valid") {
		t.Errorf("certificates: %q", got)
	}
}

// A caller that asks to cut everything cuts only rows that expired more than ten minutes ago.
func TestWhatIsValidStaysWhateverIsAsked(t *testing.T) {
	a := open(t)
	a.fill()
	for _, c := range a.store.Cuts() {
		if _, err := c.Elsewhere(t.Context(), time.Now().Add(1000*day), 500); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"said to be over", "valid", "without an end"}
	if got := a.keys("revoked_x509_certs"); !slices.Equal(got, want) {
		t.Errorf("revocations: %q", got)
	}
	if certs, tokens := a.count("x509_certs"), a.count("used_ott"); certs != 3+2 || tokens != 3+2 {
		t.Errorf("%d certificates, %d tokens", certs, tokens)
	}
}

func TestNothingIsCutInRollbackMode(t *testing.T) {
	a := open(t)
	a.fill()
	testkit.SetRollback(a.mesh, true)
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	if n := a.count("x509_certs"); n != 5+2 {
		t.Errorf("%d certificates are left", n)
	}
}

// The end is read from the certificate itself, in SQL, with the same result as the standard library's.
func TestEndsAreReadAsTheyAreWritten(t *testing.T) {
	a := open(t)
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		ends := time.Unix(rapid.Int64Range(0, 250_000_000_000).Draw(t, "ends"), 0).UTC()
		der := certificate(t, ends, rapid.IntRange(1, 2000).Draw(t, "issuer"))
		var got *time.Time
		if err := a.admin.QueryRow(a.t.Context(), `SELECT mesh_ca.certificate_end_2($1)`, der).Scan(&got); err != nil {
			t.Fatal(err)
		}
		if got == nil || !got.Equal(ends) {
			t.Errorf("read %v of %v", got, ends)
		}
	})
}

// copies writes n rows of one certificate that ends at a time.
func (a *authority) copies(n int, ends time.Time) {
	a.t.Helper()
	if _, err := a.admin.Exec(a.t.Context(),
		`INSERT INTO x509_certs SELECT ('n' || $2::bigint || g)::bytea, $1 FROM generate_series(1, $3) g`,
		certificate(a.t, ends, 10), ends.Unix(), n); err != nil {
		a.t.Fatal(err)
	}
}

// The cost of a cut follows the rows that it deletes: the rows that are kept are not read.
func TestCostFollowsWhatIsCut(t *testing.T) {
	a := open(t)
	if err := a.walk(a.store); err != nil {
		t.Fatal(err)
	}
	const kept = 50_000
	a.copies(kept, time.Now().Add(day))
	a.copies(10, time.Now().Add(-200*day))
	if _, err := a.admin.Exec(t.Context(), `VACUUM ANALYZE x509_certs`); err != nil {
		t.Fatal(err)
	}
	var plan []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	if err := a.admin.QueryRow(t.Context(),
		`EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT mesh_ca.cut_ended_certificates(now() - interval '90 days', 500)`).
		Scan(&plan); err != nil {
		t.Fatal(err)
	}
	if n := a.count("x509_certs"); n != kept {
		t.Errorf("%d certificates are left", n)
	}
	if pages := plan[0].Plan.Hit + plan[0].Plan.Read; pages > 400 {
		t.Errorf("10 rows of %d took %d buffers", kept+10, pages)
	}
}

// A login that is no superuser makes everything if it may create roles. With one that may not, or that finds objects of
// another login, the error names what an administrator has to do.
func TestLogins(t *testing.T) {
	for _, c := range []struct {
		name, right string
		made        bool // a superuser has made functions of an earlier version
		failure     string
	}{
		{name: "may make roles", right: "CREATEROLE"},
		{name: "may not", right: "NOCREATEROLE", failure: "NOLOGIN; GRANT mesh_ca_retention_"},
		{name: "of another", right: "CREATEROLE", made: true, failure: "; DROP SCHEMA mesh_ca CASCADE`"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := open(t)
			if c.made {
				if err := a.walk(a.store); err != nil {
					t.Fatal(err)
				}
				a.exec(`COMMENT ON SCHEMA mesh_ca IS 'version 1'`)
			}
			login := "ca_" + strings.ReplaceAll(ids.New(), "-", "")
			dsn, err := url.Parse(a.admin.Config().ConnString())
			if err != nil {
				t.Fatal(err)
			}
			a.exec(fmt.Sprintf(`CREATE ROLE %[1]s LOGIN %[2]s PASSWORD 'x'; GRANT CREATE ON SCHEMA public TO %[1]s;
				DO $$ BEGIN EXECUTE format('GRANT CONNECT, CREATE ON DATABASE %%I TO %[1]s', current_database()); END $$;
				ALTER TABLE x509_certs OWNER TO %[1]s; ALTER TABLE x509_certs_data OWNER TO %[1]s; ALTER TABLE used_ott OWNER TO
					%[1]s;
				ALTER TABLE revoked_x509_certs OWNER TO %[1]s; ALTER SCHEMA public OWNER TO %[1]s`, login, c.right))
			if c.made {
				a.exec(fmt.Sprintf(`DO $$ BEGIN EXECUTE (SELECT format('GRANT mesh_ca_retention_%%s TO %s', oid) FROM pg_database
					WHERE datname = current_database()); END $$`, login))
			}
			t.Cleanup(func() {
				// The role is of the whole server.
				if _, err := a.admin.Exec(context.WithoutCancel(t.Context()),
					`DROP OWNED BY `+login+` CASCADE; DROP ROLE `+login); err != nil {
					t.Error(err)
				}
			})
			dsn.User = url.UserPassword(login, "x")
			err = a.walk(a.openAs(dsn.String()))
			if c.failure == "" && err != nil {
				t.Fatal(err)
			}
			if c.failure != "" && (err == nil || !strings.Contains(err.Error(), c.failure)) {
				t.Fatalf("it says %v", err)
			}
		})
	}
}
