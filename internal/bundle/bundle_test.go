package bundle_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/bundle"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type fixture struct {
	authorities *rpctest.Authorities
	manifest    bundle.Manifest
	files       bundle.Files
	archive     []byte
}

func newFixture(tb testing.TB) fixture {
	tb.Helper()
	a := rpctest.NewAuthorities(tb)
	env, err := bundle.RenderEnv(
		bundle.Variable{Name: bundle.EnvAPIURL, Value: "https://api.test:443"}, bundle.Variable{Name: bundle.EnvTerminalURL},
		bundle.Variable{Name: bundle.EnvToken, Value: "gnb_secret"})
	if err != nil {
		tb.Fatal(err)
	}
	f := fixture{
		authorities: a,
		manifest: bundle.Manifest{
			NodeID: ids.New(), NodeName: "n1", TrustDomain: rpctest.TrustDomain, TokenID: ids.New(),
			IssuedAt: time.Unix(1e9, 0).UTC(), ExpiresAt: time.Unix(1e9+3600, 0).UTC(),
			Profile: bundle.Profile{Name: "default", Fingerprint: "f", Version: 3},
			Package: bundle.Package{AgentVersion: "1.2.3"},
		},
		files: bundle.Files{Env: env, CA: a.ServiceRoots.PEM(), RecoveryCA: a.ServiceRoots.PEM()},
	}
	if f.archive, err = bundle.Write(f.manifest, f.files, a.Service(tb, "recovery").Certificate()); err != nil {
		tb.Fatal(err)
	}
	return f
}

// invalid fails unless an error is the refusal of a bundle, and returns its text.
func invalid(tb testing.TB, err error) string {
	tb.Helper()
	f, ok := fault.As(err)
	if !ok || f.Reason != commonv1.Reason_REASON_BUNDLE_INVALID {
		tb.Fatalf("got %v, want bundle_invalid", err)
	}
	return f.Public
}

func TestWhatIsWrittenIsReadAsAWhole(t *testing.T) {
	f := newFixture(t)
	got, err := bundle.Read(f.archive)
	if err != nil {
		t.Fatal(err)
	}
	want := f.manifest
	want.Format, want.Files = got.Manifest.Format, got.Manifest.Files
	if diff := cmp.Diff(want, got.Manifest); diff != "" {
		t.Errorf("manifest (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(f.files, got.Files); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if strings.Contains(string(got.Files.Env), "TERMINAL") {
		t.Error("a variable without a value was written")
	}
	if err := got.Verify(f.authorities.ServiceRoots, rpctest.TrustDomain, time.Now()); err != nil {
		t.Errorf("a bundle of ours: %v", err)
	}
	digest := bundle.DigestOf(f.archive)
	hexadecimal := strings.TrimPrefix(digest, "sha256:")
	for _, text := range []string{digest, "sha256:" + strings.ToUpper(hexadecimal), hexadecimal, " " + digest + "\n"} {
		if err := got.CheckDigest(text); err != nil {
			t.Errorf("digest %q: %v", text, err)
		}
	}
	for _, text := range []string{"", "sha256:", digest[:len(digest)-1] + "x", bundle.DigestOf(nil)} {
		invalid(t, got.CheckDigest(text))
	}
}

// A signature counts only if the roots that a host has verify recovery's certificate, in its time, and it is over this
// manifest.
func TestSignaturesOfOthersAreNotOurs(t *testing.T) {
	f := newFixture(t)
	other := newFixture(t)
	read := func(archive []byte) *bundle.Archive {
		got, err := bundle.Read(archive)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	byNodeAPI, err := bundle.Write(f.manifest, f.files, f.authorities.Service(t, "nodeapi").Certificate())
	if err != nil {
		t.Fatal(err)
	}
	byNode, err := bundle.Write(f.manifest, f.files, f.authorities.Node(t, f.manifest.NodeID).Certificate())
	if err != nil {
		t.Fatal(err)
	}
	moved := repack(t, f.archive, func(e *entry) {
		if e.Name == "signature.json" {
			e.body = entries(t, other.archive)["signature.json"]
		}
	})
	for name, c := range map[string]struct {
		archive []byte
		roots   *pki.Bundle
		domain  string
		now     time.Time
	}{
		"other roots":        {f.archive, other.authorities.ServiceRoots, rpctest.TrustDomain, time.Now()},
		"other trust domain": {f.archive, f.authorities.ServiceRoots, "other.test", time.Now()},
		"later":              {f.archive, f.authorities.ServiceRoots, rpctest.TrustDomain, time.Now().AddDate(20, 0, 0)},
		"another service":    {byNodeAPI, f.authorities.ServiceRoots, rpctest.TrustDomain, time.Now()},
		"a node":             {byNode, f.authorities.ServiceRoots, rpctest.TrustDomain, time.Now()},
		"of another bundle":  {moved, other.authorities.ServiceRoots, rpctest.TrustDomain, time.Now()},
	} {
		if err := read(c.archive).Verify(c.roots, c.domain, c.now); err == nil {
			t.Errorf("%s: it was verified", name)
		}
	}
}

type entry struct {
	tar.Header
	body []byte
}

func unpack(tb testing.TB, archive []byte) []entry {
	tb.Helper()
	packed, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		tb.Fatal(err)
	}
	var out []entry
	for r := tar.NewReader(packed); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			tb.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			tb.Fatal(err)
		}
		out = append(out, entry{*h, body})
	}
}

func entries(tb testing.TB, archive []byte) map[string][]byte {
	tb.Helper()
	out := map[string][]byte{}
	for _, e := range unpack(tb, archive) {
		out[e.Name] = e.body
	}
	return out
}

func pack(tb testing.TB, list []entry) []byte {
	tb.Helper()
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	w := tar.NewWriter(packed)
	for _, e := range list {
		e.Size, e.Format = int64(len(e.body)), tar.FormatUnknown
		if e.Typeflag != tar.TypeReg {
			e.Size = 0
		}
		if err := w.WriteHeader(&e.Header); err != nil {
			tb.Fatal(err)
		}
		if e.Size > 0 {
			if _, err := w.Write(e.body); err != nil {
				tb.Fatal(err)
			}
		}
	}
	if err := errors.Join(w.Close(), packed.Close()); err != nil {
		tb.Fatal(err)
	}
	return out.Bytes()
}

func repack(tb testing.TB, archive []byte, change func(e *entry)) []byte {
	tb.Helper()
	list := unpack(tb, archive)
	for i := range list {
		change(&list[i])
	}
	return pack(tb, list)
}

// zip returns data as a gzip file.
func zip(tb testing.TB, data []byte, header gzip.Header) []byte {
	tb.Helper()
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	packed.Header = header
	_, err := packed.Write(data)
	if err := errors.Join(err, packed.Close()); err != nil {
		tb.Fatal(err)
	}
	return out.Bytes()
}

// hostile returns archives that are not as Write makes them, each with a part of the text with which it is refused.
func hostile(tb testing.TB, f fixture) map[string]struct {
	archive []byte
	text    string
} {
	tb.Helper()
	type one = struct {
		archive []byte
		text    string
	}
	list := unpack(tb, f.archive)
	with := func(more ...entry) []byte { return pack(tb, append(append([]entry{}, list...), more...)) }
	regular := func(name string) entry {
		return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o600}, []byte("x")}
	}
	special := func(kind byte, name, link string) entry {
		return entry{tar.Header{Name: name, Typeflag: kind, Linkname: link, Mode: 0o777, Devmajor: 1, Devminor: 3}, nil}
	}
	as := func(name string, change func(e *entry)) []byte {
		return repack(tb, f.archive, func(e *entry) {
			if e.Name == name {
				change(e)
			}
		})
	}
	plain, err := gzip.NewReader(bytes.NewReader(f.archive))
	if err != nil {
		tb.Fatal(err)
	}
	inner, err := io.ReadAll(plain)
	if err != nil {
		tb.Fatal(err)
	}
	link := func(kind byte, to string) []byte {
		return as("ca-bundle.crt", func(e *entry) { e.Typeflag, e.Linkname = kind, to })
	}
	device := as("node-agent.env", func(e *entry) { e.Typeflag, e.Devmajor = tar.TypeChar, 1 })
	records := as("manifest.json", func(e *entry) { e.PAXRecords = map[string]string{"GPUAAS.x": "y"} })
	twice := append(append([]byte{}, inner...), inner...)
	zeros := append(append([]byte{}, inner...), make([]byte, 512)...)
	bomb := zip(tb, make([]byte, 8<<20), gzip.Header{})
	return map[string]one{
		"parent":           {with(regular("../node-agent.env")), "which no bundle has"},
		"inner parent":     {with(regular("a/../../node-agent.env")), "which no bundle has"},
		"absolute":         {with(regular("/etc/gpuaas/node-agent.env")), "which no bundle has"},
		"dotted":           {with(regular("./node-agent.env")), "which no bundle has"},
		"unknown":          {with(regular("key.pem")), "which no bundle has"},
		"long name":        {with(regular(strings.Repeat("a", 300))), "which no bundle has"},
		"directory":        {with(special(tar.TypeDir, "etc/", "")), "which no bundle has"},
		"symbolic link":    {link(tar.TypeSymlink, "/etc/shadow"), "not a plain file"},
		"hard link":        {link(tar.TypeLink, "manifest.json"), "not a plain file"},
		"device":           {device, "not a plain file"},
		"block device":     {with(special(tar.TypeBlock, "node-agent.env", "")), "not a plain file"},
		"pipe":             {with(special(tar.TypeFifo, "manifest.json", "")), "not a plain file"},
		"records":          {records, "not a plain file"},
		"twice":            {with(regular("node-agent.env")), "is in it twice"},
		"huge entry":       {as("node-agent.env", func(e *entry) { e.body = make([]byte, 65<<10) }), "larger than"},
		"huge trust":       {as("ca-bundle.crt", func(e *entry) { e.body = make([]byte, 513<<10) }), "larger than"},
		"bomb of zeros":    {bomb, "follows the end of its tar"},
		"bomb of entries":  {zip(tb, bytes.Repeat(inner[:len(inner)-1024], 400), gzip.Header{}), "is in it twice"},
		"bomb of a name":   {with(regular(strings.Repeat("a", 1<<20-100))), "which no bundle has"},
		"missing":          {pack(tb, list[:len(list)-1]), "recovery-ca-bundle.crt is not in it"},
		"none":             {pack(tb, nil), "is not in it"},
		"altered":          {as("node-agent.env", func(e *entry) { e.body = bytes.ToUpper(e.body) }), "was altered"},
		"shortened":        {as("ca-bundle.crt", func(e *entry) { e.body = e.body[:10] }), "was altered"},
		"no manifest":      {as("manifest.json", func(e *entry) { e.body = []byte("[]") }), "manifest cannot be read"},
		"other format":     {as("manifest.json", func(e *entry) { e.body = []byte(`{"format":2}`) }), "format 2"},
		"no node":          {as("manifest.json", func(e *entry) { e.body = []byte(`{"format":1}`) }), "names no node"},
		"no signature":     {as("signature.json", func(e *entry) { e.body = []byte(`{}`) }), "signature cannot be read"},
		"trailing tar":     {zip(tb, twice, gzip.Header{}), "follows the end of its tar"},
		"trailing zeros":   {zip(tb, zeros, gzip.Header{}), "follows the end of its tar"},
		"trailing bytes":   {append(append([]byte{}, f.archive...), "more"...), "follows the end of its gzip"},
		"two streams":      {append(append([]byte{}, f.archive...), f.archive...), "follows the end of its gzip"},
		"named stream":     {zip(tb, inner, gzip.Header{Name: "../x"}), "gzip header"},
		"cut":              {f.archive[:len(f.archive)/2], "damaged"},
		"wrong sum":        {append(append([]byte{}, f.archive[:len(f.archive)-8]...), make([]byte, 8)...), "damaged"},
		"no gzip":          {inner, "not a gzip"},
		"nothing":          {nil, "not a gzip"},
		"larger than most": {make([]byte, bundle.MaxSize+1), "larger than"},
	}
}

func TestHostileArchivesAreRefusedAsAWhole(t *testing.T) {
	f := newFixture(t)
	for name, c := range hostile(t, f) {
		got, err := bundle.Read(c.archive)
		if got != nil {
			t.Errorf("%s: something was read", name)
		}
		if text := invalid(t, err); !strings.Contains(text, c.text) {
			t.Errorf("%s: refused with %q, want %q", name, text, c.text)
		}
	}
}

func TestAValueThatTheFileCannotHaveIsRefused(t *testing.T) {
	for _, value := range []string{"a\nb", "a'b", "a\"b", "a\x00b", "\uFFFD"} {
		_, err := bundle.RenderEnv(bundle.Variable{Name: bundle.EnvToken, Value: value})
		if err == nil || strings.Contains(err.Error(), value) {
			t.Errorf("%q: %v", value, err)
		}
	}
}

// FuzzRead has no archive accepted but whole ones, and every refusal typed.
func FuzzRead(f *testing.F) {
	good := newFixture(f)
	f.Add(good.archive)
	for _, c := range hostile(f, good) {
		if len(c.archive) < 1<<20 {
			f.Add(c.archive)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := bundle.Read(data)
		if err != nil {
			invalid(t, err)
			return
		}
		if got.Digest != bundle.DigestOf(data) || !ids.Valid(got.Manifest.NodeID) || len(got.Files.CA) == 0 ||
			len(got.Files.RecoveryCA) == 0 {
			t.Errorf("an archive that is not whole was accepted: %+v", got.Manifest)
		}
		again := repack(t, data, func(*entry) {})
		if _, err := bundle.Read(again); err != nil {
			t.Errorf("its entries alone are refused: %v", err)
		}
	})
}
