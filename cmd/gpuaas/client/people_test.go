package client_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
)

const secret = "gps_THE_SECRET"

func peopleMesh(t *testing.T) *fake {
	t.Helper()
	f := mesh(t)
	answer(f, "CreatePerson", func(req *readmodelv1.CreatePersonRequest) (*readmodelv1.CreatePersonResponse, error) {
		f.good(secret, req.GetName())
		return &readmodelv1.CreatePersonResponse{Token: secret, Person: &readmodelv1.Person{
			PersonId:  claimID,
			Name:      req.GetName(),
			Roles:     req.GetRoles(),
			Tenant:    req.GetTenant(),
			CreatedAt: at(1),
			ExpiresAt: at(9),
			State:     readmodelv1.PersonState_PERSON_STATE_LIVE,
		}}, nil
	})
	return f
}

func private(t *testing.T, path string) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v", path, info, err)
	}
}

// The token of a new person is written to a context, which does not become current, and is in no output.
func TestPeopleCreateWritesAContext(t *testing.T) {
	for _, form := range []string{"table", "wide", "json", "jsonl", "yaml", "name"} {
		f := peopleMesh(t)
		got := call(
			t,
			"people",
			"create",
			"ana",
			"--role",
			"tenant,viewer",
			"--tenant",
			"acme",
			"--expires",
			"2d",
			"-o",
			form,
		).wants(
			t,
			0,
		)
		if strings.Contains(got.out+got.err, secret) {
			t.Errorf("-o %s shows the token: %s%s", form, got.out, got.err)
		}
		if !strings.Contains(got.err, "gpuaas --context test-ana ") {
			t.Errorf("stderr: %s", got.err)
		}
		file, err := contexts.Load(f.path)
		if err != nil {
			t.Fatal(err)
		}
		own, _ := file.Get("test")
		made, err := file.Get("test-ana")
		if err != nil || made.Token != secret || made.Server != own.Server || made.CAPEM != own.CAPEM ||
			made.TrustDomain != own.TrustDomain ||
			file.Current != "test" {
			t.Errorf("context %v of %v, %v", made.Name, file.Current, err)
		}
		private(t, f.path)
		if req := sent[*readmodelv1.CreatePersonRequest](
			f,
		); len(req) != 1 || req[0].GetExpiresIn().AsDuration() != 48*time.Hour ||
			len(req[0].GetRoles()) != 2 ||
			req[0].GetTenant() != "acme" {
			t.Errorf("request: %v", req)
		}
		// The same name again would overwrite a context that may be in use, so it is refused before a person is created.
		call(t, "people", "create", "ana", "--role", "viewer").wants(t, 2)
		if req := sent[*readmodelv1.CreatePersonRequest](f); len(req) != 1 {
			t.Errorf("%d requests", len(req))
		}
		call(t, "people", "create", "ana", "--role", "viewer", "--context-name", "other").wants(t, 0)
		call(t, "config", "view", "--context", "other").wants(t, 0)
	}
}

// A directory to hand over has the files that the CLI, curl and buf need, and the caller's own contexts do not change.
func TestPeopleCreateWritesADirectory(t *testing.T) {
	f := peopleMesh(t)
	dir := filepath.Join(t.TempDir(), "ci")
	got := call(t, "people", "create", "ci", "--role", "viewer", "--out", dir).wants(t, 0)
	if strings.Contains(got.out+got.err, secret) {
		t.Errorf("the token is shown: %s%s", got.out, got.err)
	}
	own, err := contexts.Load(f.path)
	if err != nil || len(own.Contexts) != 1 {
		t.Errorf("%d own contexts, %v", len(own.Contexts), err)
	}
	handed, err := contexts.Load(filepath.Join(dir, "contexts.yaml"))
	if c, gerr := handed.Get(""); err != nil || gerr != nil || c.Token != secret || c.Name != "ci" {
		t.Errorf("handed over: %v %v %v", c.Name, err, gerr)
	}
	for name, want := range map[string]string{
		"token":         secret + "\n",
		"authorization": "Authorization: Bearer " + secret + "\n",
	} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(text) != want {
			t.Errorf("%s: %q, %v", name, text, err)
		}
		private(t, filepath.Join(dir, name))
	}
	private(t, filepath.Join(dir, "contexts.yaml"))
	if pem, err := os.ReadFile(
		filepath.Join(dir, "ca.pem"),
	); err != nil ||
		!strings.Contains(string(pem), "BEGIN CERTIFICATE") {
		t.Errorf("ca.pem: %s, %v", pem, err)
	}
	var files []string
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		files = append(files, e.Name())
	}
	if err != nil || !slices.Equal(files, []string{"authorization", "ca.pem", "contexts.yaml", "token"}) {
		t.Errorf("the directory holds %v, %v", files, err)
	}
	call(t, "people", "create", "second", "--role", "viewer", "--out", dir).wants(t, 2)
	if req := sent[*readmodelv1.CreatePersonRequest](f); len(req) != 1 {
		t.Errorf("%d requests", len(req))
	}
}

// A new person whose token cannot be written is ended again.
func TestPeopleCreateWithdrawsWhatItCannotKeep(t *testing.T) {
	f := peopleMesh(t)
	dir := filepath.Join(t.TempDir(), "gone")
	answer(f, "CreatePerson", func(req *readmodelv1.CreatePersonRequest) (*readmodelv1.CreatePersonResponse, error) {
		// A file replaces the directory after the check and before the answer.
		if err := errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
			return nil, err
		}
		return &readmodelv1.CreatePersonResponse{
			Token:  secret,
			Person: &readmodelv1.Person{PersonId: claimID, Name: req.GetName()},
		}, nil
	})
	always(f, "EndPerson", &readmodelv1.EndPersonResponse{})
	got := call(t, "people", "create", "ci", "--role", "viewer", "--out", dir).wants(t, 1)
	if !strings.Contains(got.err, "ended again") || strings.Contains(got.err, secret) {
		t.Errorf("stderr: %s", got.err)
	}
	if req := sent[*readmodelv1.EndPersonRequest](f); len(req) != 1 || req[0].GetPerson() != claimID {
		t.Errorf("ended: %v", req)
	}
	if _, err := os.Stat(filepath.Join(dir, "token")); err == nil || errors.Is(err, fs.ErrPermission) {
		t.Errorf("a token was left: %v", err)
	}
}

func TestPeopleRefusals(t *testing.T) {
	f := peopleMesh(t)
	call(t, "people", "create", "ana").wants(t, 2)
	call(t, "people", "create", "ana", "--role", "viewer", "--expires", "soon").wants(t, 2)
	refuse(
		f,
		"CreatePerson",
		fault.New(
			commonv1.Reason_REASON_ROLE_NOT_HELD,
			"",
			fault.Unmet("none of your roles (security) includes operator"),
		),
	)
	got := call(t, "people", "create", "ana", "--role", "operator").wants(t, 4)
	if !strings.Contains(got.err, "role_not_held") ||
		!strings.Contains(got.err, "because: none of your roles (security) includes operator") {
		t.Errorf("stderr: %s", got.err)
	}
	if file, err := contexts.Load(f.path); err != nil || len(file.Contexts) != 1 {
		t.Errorf("a refusal left a context: %v, %v", len(file.Contexts), err)
	}
	// The fields are named as the person gave them.
	refuse(f, "CreatePerson", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "",
		fault.Unmet("expires_in: from 5m to 30d", "name: lower case letters only", "roles[1]: no role", "tenant: needed",
			"who_knows: wrong")))
	got = call(t, "people", "create", "ana", "--role", "viewer", "--expires", "1m").wants(t, 2)
	for _, want := range []string{
		"invalid: --expires: from", "invalid: NAME: lower", "invalid: --role: no role",
		"invalid: --tenant: needed", "invalid: who_knows: wrong",
	} {
		if !strings.Contains(got.err, "  "+want) {
			t.Errorf("no %q in %s", want, got.err)
		}
	}
	refuse(f, "EndPerson", fault.New(commonv1.Reason_REASON_LAST_SECURITY_PERSON, ""))
	call(t, "people", "end", "root", "--yes").wants(t, 5)
	refuse(f, "CreatePerson", fault.New(commonv1.Reason_REASON_ALREADY_EXISTS, ""))
	call(t, "people", "create", "ana", "--role", "viewer").wants(t, 5)
}

// TestPeopleCreateTakesOverADeadContext: a context whose token is not valid is overwritten, and so is that of the same
// person if the request is repeated with its key, which replaces the token. A token that is in use is not lost, and
// none is sent to another mesh.
func TestPeopleCreateTakesOverADeadContext(t *testing.T) {
	f := peopleMesh(t)
	tokenOf := func(name string) string {
		t.Helper()
		file, err := contexts.Load(f.path)
		if err != nil {
			t.Fatal(err)
		}
		c, err := file.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		return c.Token
	}
	issued := 0
	keys := map[string]string{} // by name
	answer(f, "CreatePerson", func(req *readmodelv1.CreatePersonRequest) (*readmodelv1.CreatePersonResponse, error) {
		if key, made := keys[req.GetName()]; made && (key == "" || key != req.GetIdempotencyKey()) {
			return nil, fault.New(commonv1.Reason_REASON_ALREADY_EXISTS, "")
		}
		keys[req.GetName()] = req.GetIdempotencyKey()
		issued++
		token := fmt.Sprintf("gps_%d", issued)
		f.good(token, req.GetName())
		return &readmodelv1.CreatePersonResponse{
			Token:  token,
			Person: &readmodelv1.Person{PersonId: claimID, Name: req.GetName()},
		}, nil
	})
	call(t, "people", "create", "ana", "--role", "viewer", "--idempotency-key", "k").wants(t, 0)
	call(t, "people", "create", "ana", "--role", "viewer", "--idempotency-key", "k").wants(t, 0)
	if got := tokenOf("test-ana"); got != "gps_2" {
		t.Errorf("the context holds %s after the same request", got)
	}
	call(t, "people", "create", "ana", "--role", "viewer", "--idempotency-key", "other").wants(t, 5)
	if got := call(t, "people", "create", "ana", "--role", "viewer").wants(t, 2); !strings.Contains(got.err,
		"--context-name") || issued != 2 {
		t.Errorf("a token in use was lost: %s", got.err)
	}
	// The context of another person.
	call(t, "people", "create", "ben", "--role", "viewer", "--context-name", "test-ana", "--idempotency-key", "b").wants(t,
		2)
	// The person was ended, so another person may take the name and the context.
	f.good("gps_elsewhere", "ana")
	delete(keys, "ana")
	call(t, "people", "create", "ana", "--role", "viewer").wants(t, 0)
	if got := tokenOf("test-ana"); got != "gps_3" {
		t.Errorf("the context of an ended person holds %s", got)
	}
	// A context of another mesh at the same address: its token is not sent.
	file, err := contexts.Load(f.path)
	own, _ := file.Get("test")
	for name, other := range map[string]contexts.Context{
		"authority": {
			Server: own.Server, TrustDomain: own.TrustDomain, CAPEM: string(
				rpctest.NewAuthorities(t).ServiceRoots.PEM(),
			), Token: "gps_dead",
		},
		"domain": {Server: own.Server, TrustDomain: "other.test", CAPEM: own.CAPEM, Token: "gps_dead"},
		"server": {Server: "127.0.0.1:1", TrustDomain: own.TrustDomain, CAPEM: own.CAPEM, Token: "gps_dead"},
		"file":   {Server: own.Server, TrustDomain: own.TrustDomain, CAPEM: own.CAPEM, TokenFile: "gone"},
	} {
		other.Name = name
		if err = errors.Join(err, contexts.Put(f.path, other, false)); err != nil {
			t.Fatal(err)
		}
		call(t, "people", "create", "new", "--role", "viewer", "--context-name", name).wants(t, 2)
		if f.shown["gps_dead"] {
			t.Fatalf("%s: its token was shown", name)
		}
	}
}
