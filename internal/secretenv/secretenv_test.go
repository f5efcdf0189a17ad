package secretenv_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/secretenv"
)

const secret = "correct horse battery staple"

func owner() secretenv.Owner {
	return secretenv.Owner{TenantID: "tenant-a", WorkspaceID: "workspace-a"}
}

func set(tb testing.TB, lines ...string) *secretenv.Keys {
	tb.Helper()
	keys, err := secretenv.Parse(strings.Join(lines, "\n"))
	if err != nil {
		tb.Fatal(err)
	}
	return keys
}

func spec() *lifecyclev1.WorkspaceSpec {
	return &lifecyclev1.WorkspaceSpec{Plan: "local", Workloads: []*nodev1.Workload{
		{Name: "main", Command: []string{"serve"}, Env: map[string]string{"TOKEN": secret, "EMPTY": ""}},
		{Name: "side", Command: []string{"help"}},
	}}
}

func sealed(tb testing.TB, keys *secretenv.Keys) *lifecyclev1.WorkspaceSpec {
	tb.Helper()
	out, err := keys.Seal(spec(), owner())
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

func deployOf(w *nodev1.Workload) *nodev1.WorkloadDeploy {
	return &nodev1.WorkloadDeploy{Workload: proto.CloneOf(w)}
}

func TestSealedValuesOpenAgain(t *testing.T) {
	keys := set(t, secretenv.NewKey())
	stored := sealed(t, keys)
	raw, err := proto.Marshal(stored)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(raw, []byte(secret)) {
		t.Errorf("a value stands in the clear: %v", stored)
	}
	for i, want := range spec().GetWorkloads() {
		deploy := deployOf(stored.GetWorkloads()[i])
		deploy.SecretEnv = map[string]string{"DATABASE_URL": secret}
		if err := keys.SealDeploy(deploy, owner()); err != nil {
			t.Fatal(err)
		}
		if len(deploy.GetSecretEnv()) > 0 || strings.Contains(deploy.String(), secret) {
			t.Errorf("a credential stands in the clear: %v", deploy)
		}
		if err := keys.OpenDeploy(deploy, owner()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(&nodev1.WorkloadDeploy{Workload: want, SecretEnv: map[string]string{"DATABASE_URL": secret}},
			deploy, protocmp.Transform()); diff != "" {
			t.Error(diff)
		}
	}
	again := sealed(t, keys)
	if bytes.Equal(stored.GetWorkloads()[0].GetSealedEnv()["TOKEN"], again.GetWorkloads()[0].GetSealedEnv()["TOKEN"]) {
		t.Error("equal values are equal bytes")
	}
}

func TestSealedValuesStayWhereTheyWereSealed(t *testing.T) {
	keys := set(t, secretenv.NewKey())
	tests := map[string]struct {
		owner secretenv.Owner
		edit  func(*nodev1.WorkloadDeploy)
	}{
		"another workspace":       {owner: secretenv.Owner{TenantID: "tenant-a", WorkspaceID: "workspace-b"}},
		"another tenant":          {owner: secretenv.Owner{TenantID: "tenant-b", WorkspaceID: "workspace-a"}},
		"parts that run together": {owner: secretenv.Owner{TenantID: "tenant-aw", WorkspaceID: "orkspace-a"}},
		"another name": {owner: owner(), edit: func(d *nodev1.WorkloadDeploy) {
			env := d.GetWorkload().GetSealedEnv()
			env["EMPTY"], env["TOKEN"] = env["TOKEN"], env["EMPTY"]
		}},
		"another workload": {owner: owner(), edit: func(d *nodev1.WorkloadDeploy) { d.GetWorkload().Name = "side" }},
		"another purpose": {owner: owner(), edit: func(d *nodev1.WorkloadDeploy) {
			d.SealedSecretEnv, d.GetWorkload().SealedEnv = d.GetWorkload().GetSealedEnv(), nil
		}},
		"altered": {
			owner: owner(), edit: func(d *nodev1.WorkloadDeploy) { d.GetWorkload().GetSealedEnv()["TOKEN"][30] ^= 1 },
		},
		"truncated": {
			owner: owner(), edit: func(d *nodev1.WorkloadDeploy) { d.GetWorkload().GetSealedEnv()["TOKEN"] = []byte{1} },
		},
		"a version of later": {
			owner: owner(), edit: func(d *nodev1.WorkloadDeploy) { d.GetWorkload().GetSealedEnv()["TOKEN"][0] = 2 },
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			deploy := deployOf(sealed(t, keys).GetWorkloads()[0])
			if tt.edit != nil {
				tt.edit(deploy)
			}
			before := proto.CloneOf(deploy)
			err := keys.OpenDeploy(deploy, tt.owner)
			if !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_INVALID) {
				t.Errorf("got %v", err)
			}
			if diff := cmp.Diff(before, deploy, protocmp.Transform()); diff != "" {
				t.Errorf("a part was opened: %s", diff)
			}
		})
	}
}

func TestKeysAreReplacedByAddingOne(t *testing.T) {
	old, next := secretenv.NewKey(), secretenv.NewKey()
	before, after := set(t, old), set(t, next, old)
	stored := sealed(t, before)
	sum, err := secretenv.SumOf(spec())
	if err != nil {
		t.Fatal(err)
	}
	digest, err := before.Digest(sum)
	if err != nil {
		t.Fatal(err)
	}
	if err := after.OpenDeploy(deployOf(stored.GetWorkloads()[0]), owner()); err != nil {
		t.Errorf("an old value under a new first key: %v", err)
	}
	if ok, err := after.Matches(digest, sum); !ok || err != nil {
		t.Errorf("an old digest under a new first key: %v, %v", ok, err)
	}
	if now, _ := after.Digest(sum); now == digest {
		t.Error("the first key does not make the digest")
	}
	alone := set(t, next)
	if err := alone.OpenDeploy(deployOf(stored.GetWorkloads()[0]), owner()); !fault.Has(err,
		commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) ||
		!strings.Contains(err.Error(), before.First()) {
		t.Errorf("without the old key: %v", err)
	}
	if err := alone.Opens(stored, owner()); !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) {
		t.Errorf("without the old key: %v", err)
	}
	if _, err := alone.Matches(digest, sum); !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) {
		t.Errorf("without the old key: %v", err)
	}
	var none *secretenv.Keys
	if err := none.OpenDeploy(deployOf(stored.GetWorkloads()[0]), owner()); !fault.Has(err,
		commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) {
		t.Errorf("without any key: %v", err)
	}
	if _, err := none.Seal(spec(), owner()); err == nil {
		t.Error("sealed without a key")
	}
}

func TestDigestsAreKeyed(t *testing.T) {
	keys, others := set(t, secretenv.NewKey()), set(t, secretenv.NewKey())
	sum, err := secretenv.SumOf(spec())
	if err != nil {
		t.Fatal(err)
	}
	changed := spec()
	changed.GetWorkloads()[0].Env["TOKEN"] = "another"
	other, err := secretenv.SumOf(changed)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := keys.Digest(sum)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := others.Digest(sum)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(digest, string(sum)) || digest[len(digest)-64:] == foreign[len(foreign)-64:] {
		t.Errorf("the digest %s can be made without the key", digest)
	}
	if ok, err := keys.Matches(digest, other); ok || err != nil {
		t.Errorf("another spec matches: %v, %v", ok, err)
	}
	// A digest that was stored before digests were keyed.
	if ok, err := keys.Matches(string(sum), sum); !ok || err != nil {
		t.Errorf("a bare digest: %v, %v", ok, err)
	}
	if bare, ok := secretenv.Bare(string(sum)); !ok || bare != sum {
		t.Errorf("bare: %v, %v", bare, ok)
	}
	for _, not := range []string{"", digest, "abc"} {
		if _, ok := secretenv.Bare(not); ok {
			t.Errorf("%q counts as bare", not)
		}
	}
	if ok, err := keys.Matches("", sum); ok || err != nil {
		t.Errorf("no digest matches: %v, %v", ok, err)
	}
}

func TestPeopleSeeNames(t *testing.T) {
	want := []string{"EMPTY", "TOKEN"}
	for name, in := range map[string]*lifecyclev1.WorkspaceSpec{
		"clear":  spec(),
		"sealed": sealed(t, set(t, secretenv.NewKey())),
	} {
		secretenv.ShowNames(in)
		secretenv.ShowNames(in) // as it is shown to the next reader
		w := in.GetWorkloads()[0]
		if !cmp.Equal(w.GetEnvNames(), want) || len(w.GetEnv())+len(w.GetSealedEnv()) > 0 ||
			strings.Contains(in.String(), secret) {
			t.Errorf("%s: %v", name, in)
		}
		if err := secretenv.Check(in); !fault.Has(err, commonv1.Reason_REASON_INVALID_ARGUMENT) {
			t.Errorf("a spec without its values was taken: %v", err)
		}
	}
	if err := secretenv.Check(sealed(t, set(t, secretenv.NewKey()))); !fault.Has(err,
		commonv1.Reason_REASON_INVALID_ARGUMENT) {
		t.Errorf("sealed values were taken: %v", err)
	}
	if err := secretenv.Check(spec()); err != nil {
		t.Error(err)
	}
}

func TestKeyFiles(t *testing.T) {
	dir := t.TempDir()
	key := secretenv.NewKey()
	put := func(name, text string, mode os.FileMode) config.SecretFile {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return config.SecretFile(path)
	}
	good, err := secretenv.Load(put("good", "# the newest\n"+key+"\n\n"+secretenv.NewKey()+"\n", 0o600))
	if err != nil || good.First() != set(t, key).First() {
		t.Fatalf("got %v", err)
	}
	for name, file := range map[string]config.SecretFile{
		"unset": "", "missing": config.SecretFile(filepath.Join(dir, "missing")), "empty": put("empty", "", 0o600),
		"comments alone": put("comments", "# nothing\n", 0o600), "short": put("short", "c2hvcnQ=\n", 0o600),
		"no base64": put("words", key+"\nnot a key "+key+"\n", 0o600), "twice": put("twice", key+"\n"+key+"\n", 0o600),
		"readable by others": put("open", key+"\n", 0o644), "a directory": config.SecretFile(dir),
	} {
		_, err := secretenv.Load(file)
		if err == nil || !strings.Contains(err.Error(), "openssl rand -base64 32") || strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
