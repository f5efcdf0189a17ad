package port_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/testkit"
)

// answer is a response of the API as a client without our code reads it.
type answer struct {
	status int
	code   string
	denial *commonv1.Denial // nil: the refusal is untyped
	text   string
}

// post sends a body to a procedure and reads the refusal, if it is one.
func (f *fixture) post(t *testing.T, caller, procedure string, body io.Reader, headers ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.server.URL()+procedure, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	client := f.Client(t, "recovery", nil)
	if caller != "" {
		client = f.Client(t, "recovery", f.Service(t, caller))
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	out := answer{status: resp.StatusCode, text: string(raw)}
	var wire struct {
		Code    string `json:"code"`
		Details []struct {
			Type  string `json:"type"`
			Value string `json:"value"`
		} `json:"details"`
	}
	if json.Unmarshal(raw, &wire) != nil {
		return out
	}
	out.code = wire.Code
	for _, d := range wire.Details {
		if d.Type != "gpuaas.common.v1.Denial" {
			continue
		}
		value, err := base64.RawStdEncoding.DecodeString(d.Value)
		if err != nil {
			t.Fatal(err)
		}
		out.denial = &commonv1.Denial{}
		if err := proto.Unmarshal(value, out.denial); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func (a answer) want(t *testing.T, reason commonv1.Reason, texts ...string) {
	t.Helper()
	if a.denial == nil || a.denial.GetReason() != reason {
		t.Errorf("got %d %s, want a typed %s", a.status, a.text, names.Of(reason))
		return
	}
	if a.denial.GetCorrelationId() == "" {
		t.Error("the refusal has no correlation id")
	}
	for _, text := range texts {
		if !strings.Contains(strings.Join(a.denial.GetUnmet(), "\n")+a.denial.GetMessage(), text) {
			t.Errorf("the refusal does not name %q: %v", text, a.denial)
		}
	}
}

const (
	whoAmI = readmodelv1connect.QueryServiceWhoAmIProcedure
	retire = recoveryv1connect.InstanceServiceRetireInstanceProcedure
)

// people is a port on which persons authenticate by token, without a certificate.
func people(t *testing.T, edit func(*port.Config)) *fixture {
	t.Helper()
	return start(t, &backend{
		whoami: func(context.Context, *readmodelv1.WhoAmIRequest) (*readmodelv1.WhoAmIResponse, error) {
			return &readmodelv1.WhoAmIResponse{}, nil
		},
		retire: func(context.Context, *recoveryv1.RetireInstanceRequest) (*recoveryv1.RetireInstanceResponse, error) {
			return &recoveryv1.RetireInstanceResponse{}, nil
		},
	}, func(_ *port.Deps, cfg *port.Config) {
		cfg.TLS.Optional = true
		if edit != nil {
			edit(cfg)
		}
	})
}

// A stranger is refused by the header alone: the body of this request never comes.
func TestStrangersAreRefusedBeforeTheirBodyIsRead(t *testing.T) {
	f := people(t, func(cfg *port.Config) { cfg.BodyTimeout = time.Hour })
	for _, contentType := range []string{"application/json", "application/proto"} {
		body, write := io.Pipe()
		t.Cleanup(func() { _ = write.Close() })
		got := f.post(t, "", whoAmI, body, "Content-Type", contentType)
		if got.status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", contentType, got.status, got.text)
		}
	}
	body, write := io.Pipe()
	t.Cleanup(func() { _ = write.Close() })
	f.post(t, "", whoAmI, body).want(t, commonv1.Reason_REASON_UNAUTHENTICATED)
}

func TestBodiesMustArriveInTime(t *testing.T) {
	f := people(t, func(cfg *port.Config) { cfg.BodyTimeout = 3 * time.Second })
	body, write := io.Pipe()
	t.Cleanup(func() { _ = write.Close() })
	go func() { _, _ = write.Write([]byte("{")) }()
	f.post(t, "", whoAmI, body, "Authorization", "Bearer good").want(t, commonv1.Reason_REASON_DEADLINE_EXCEEDED,
		"did not arrive within")
	// The connection serves on.
	if got := f.post(t, "", whoAmI, strings.NewReader("{}"), "Authorization", "Bearer good"); got.status != http.StatusOK {
		t.Errorf("afterwards: %d %s", got.status, got.text)
	}
}

// endless is a body without a length.
type endless struct{ read int64 }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	e.read += int64(len(p))
	return len(p), nil
}

func TestBodiesWithoutALengthAreBounded(t *testing.T) {
	f := people(t, nil)
	body := &endless{}
	f.post(t, "", whoAmI, body, "Authorization", "Bearer good").want(t, commonv1.Reason_REASON_FRAME_TOO_LARGE)
}

func zipped(t *testing.T, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// Scenario: D05.
func TestWhatIsInflatedIsBounded(t *testing.T) {
	f := people(t, nil)
	bomb := zipped(t, bytes.Repeat([]byte(" "), 16<<20))
	enveloped := func(message []byte) []byte {
		head := binary.BigEndian.AppendUint32([]byte{1}, uint32(len(message)))
		return append(head, message...)
	}
	f.post(t, "", whoAmI, bytes.NewReader(bomb), "Authorization", "Bearer good", "Content-Encoding", "gzip").
		want(t, commonv1.Reason_REASON_FRAME_TOO_LARGE)
	f.post(t, "", whoAmI, strings.NewReader("no gzip"), "Authorization", "Bearer good", "Content-Encoding", "gzip").
		want(t, commonv1.Reason_REASON_INVALID_ARGUMENT, "gzip")
	f.post(t, "", whoAmI, strings.NewReader("{}"), "Authorization", "Bearer good", "Content-Encoding", "br").
		want(t, commonv1.Reason_REASON_INVALID_ARGUMENT, "Content-Encoding")
	small := bytes.NewReader(zipped(t, []byte("{}")))
	if got := f.post(t, "", whoAmI, small, "Authorization", "Bearer good", "Content-Encoding",
		"gzip"); got.status != http.StatusOK {
		t.Errorf("a small body: %d %s", got.status, got.text)
	}
	// gRPC frames its messages, with a flag in each frame for compression.
	for name, tt := range map[string]struct {
		message []byte
		status  string
	}{"small": {zipped(t, nil), "0"}, "bomb": {bomb, "8"}} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.server.URL()+whoAmI,
			bytes.NewReader(enveloped(tt.message)))
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range [][2]string{
			{"Content-Type", "application/grpc"},
			{"Grpc-Encoding", "gzip"},
			{"Te", "trailers"},
			{"Authorization", "Bearer good"},
		} {
			req.Header.Set(h[0], h[1])
		}
		resp, err := f.Client(t, "recovery", nil).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if got := resp.Header.Get("Grpc-Status") + resp.Trailer.Get("Grpc-Status"); got != tt.status {
			t.Errorf("%s: status %s, want %s", name, got, tt.status)
		}
	}
}

func TestFieldsThatDoNotExistAreRefusedByName(t *testing.T) {
	f := people(t, nil)
	f.post(t, "", whoAmI, strings.NewReader(`{"dryrun": true}`), "Authorization", "Bearer good").
		want(t, commonv1.Reason_REASON_INVALID_ARGUMENT, `unknown field "dryrun"`)
	body := `{"instanceId":"x","bogus":1}`
	f.post(t, "lifecycle", retire, strings.NewReader(body)).want(t, commonv1.Reason_REASON_INVALID_ARGUMENT,
		`unknown field "bogus"`)
}

func TestWhatCannotBeDecodedIsATypedRefusal(t *testing.T) {
	f := people(t, nil)
	for _, tt := range []struct{ contentType, body string }{
		{"application/json", `{"instanceId":`},
		{"application/json", `[]`},
		{"application/json", ``},
		{"application/json", `{"epoch":"x"}`},
		{"application/json; charset=utf-8", `{"epoch":true}`},
		{"application/json", "{\"reason\":\"\xff\"}"},
		{"application/proto", "\xff\xff\xff"},
		{"application/proto", "\x0a\x02\xff\xfe"},
	} {
		got := f.post(t, "lifecycle", retire, strings.NewReader(tt.body), "Content-Type", tt.contentType)
		got.want(t, commonv1.Reason_REASON_INVALID_ARGUMENT)
		for _, internal := range []string{"*recoveryv1", "unmarshal", "proto:", "recoveryv1."} {
			if strings.Contains(got.text, internal) {
				t.Errorf("%q of %s: the refusal shows %q: %s", tt.body, tt.contentType, internal, got.text)
			}
		}
	}
}

// Scenario: C12.
func TestTextsWithoutAPlaceInPostgresAreRefusedByField(t *testing.T) {
	f := people(t, nil)
	for _, tt := range []struct{ body, field string }{
		{`{"instanceId":"a\u0000b"}`, "instance_id"},
		{`{"reason":"a\u0000"}`, "reason"},
	} {
		f.post(t, "lifecycle", retire, strings.NewReader(tt.body)).want(t, commonv1.Reason_REASON_INVALID_ARGUMENT,
			tt.field+": it contains U+0000")
	}
	req := retireRequest()
	req.Reason = "a\x00b"
	_, err := f.instances(t, "lifecycle").RetireInstance(t.Context(), req)
	want(t, err, commonv1.Reason_REASON_INVALID_ARGUMENT)

	// A text that spells an escape is a text.
	raw := `{"reason":"\\u0000"}`
	got := f.post(t, "lifecycle", retire, strings.NewReader(raw))
	if strings.Contains(strings.Join(got.denial.GetUnmet(), "\n"), "U+0000") {
		t.Errorf("an escape that is spelled was taken for one: %v", got.denial)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	f := people(t, func(cfg *port.Config) { cfg.MaxConnections = 2 })
	first, second := f.Client(t, "recovery", nil), f.Client(t, "recovery", nil)
	call := func(client *http.Client) error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.server.URL()+whoAmI, strings.NewReader("{}"))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer good")
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.Body.Close()
	}
	for _, client := range []*http.Client{first, second} {
		if err := call(client); err != nil {
			t.Fatal(err)
		}
	}
	if err := call(f.Client(t, "recovery", nil)); err == nil {
		t.Error("a third connection was served")
	}
	if err := call(first); err != nil {
		t.Errorf("an open connection suffers: %v", err)
	}
	second.CloseIdleConnections()
	deadline := time.Now().Add(testkit.Patience)
	for err := call(f.Client(t, "recovery", nil)); err != nil; err = call(f.Client(t, "recovery", nil)) {
		if time.Now().After(deadline) {
			t.Fatalf("a place that was given back is not taken: %v", err)
		}
	}
}

// A person who may ask readmodel must not be refused by the owner that readmodel asks for that person.
func TestRolesAgreeBetweenTheFrontAndTheOwner(t *testing.T) {
	policies := map[string]map[string]rpc.Policy{}
	protoregistry.GlobalFiles.RangeFilesByPackage("gpuaas.readmodel.v1", collect(t, policies, "front"))
	protoregistry.GlobalFiles.RangeFilesByPackage("gpuaas.lifecycle.v1", collect(t, policies, "owner"))
	protoregistry.GlobalFiles.RangeFilesByPackage("gpuaas.recovery.v1", collect(t, policies, "owner"))
	compared := 0
	for method, front := range policies["front"] {
		owner, ok := policies["owner"][method]
		if !ok || !owner.Allows("readmodel") || owner.Person == commonv1.Person_PERSON_NONE {
			continue
		}
		compared++
		for _, role := range front.Roles {
			if len(owner.Roles) > 0 && !slices.Contains(owner.Roles, role) {
				t.Errorf("%s lets %s in, %s does not", front.Procedure, role, owner.Procedure)
			}
		}
	}
	if compared < 5 {
		t.Errorf("only %d methods were compared", compared)
	}
}

func collect(t *testing.T, into map[string]map[string]rpc.Policy, side string) func(protoreflect.FileDescriptor) bool {
	t.Helper()
	if into[side] == nil {
		into[side] = map[string]rpc.Policy{}
	}
	return func(file protoreflect.FileDescriptor) bool {
		set, err := rpc.Policies(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, policy := range set {
			into[side][string(policy.Method().Name())] = policy
		}
		return true
	}
}
