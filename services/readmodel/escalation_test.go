package readmodel_test

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/escalation"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// escalate returns the files of a bundle by name.
func (k *kit) escalate(token, workspace string) (map[string][]byte, error) {
	k.t.Helper()
	client := readmodelv1connect.NewEscalationServiceClient(k.http(token, true), k.url())
	stream, err := client.Escalate(testkit.Context(k.t), &readmodelv1.EscalateRequest{Workspace: workspace})
	k.check(err)
	defer stream.Close() // read to its end
	var raw bytes.Buffer
	for first := true; stream.Receive(); first = false {
		if part := stream.Msg(); first != (part.GetCollectedAt() != nil) {
			k.t.Error("the time of collection is in the first part and no other")
		}
		raw.Write(stream.Msg().GetChunk())
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	z, err := zip.NewReader(bytes.NewReader(raw.Bytes()), int64(raw.Len()))
	k.check(err)
	files := map[string][]byte{}
	for _, f := range z.File {
		r, err := f.Open()
		k.check(err)
		files[f.Name], err = io.ReadAll(r)
		k.check(err)
	}
	return files, nil
}

func (k *kit) audited(tenant projecttest.Tenant, entries ...audit.Entry) {
	k.t.Helper()
	ctx := rpc.WithPerson(testkit.Context(k.t),
		rpc.Person{Subject: "ana@" + tenant.Name, TenantID: tenant.ID, Roles: []string{"tenant"}})
	k.check(pg.InTx(ctx, k.DB.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		for i := range entries {
			entries[i].SubjectType, entries[i].SubjectID = "workspace", tenant.WorkspaceID
			entries[i].TenantID, entries[i].WorkspaceID = tenant.ID, tenant.WorkspaceID
		}
		_, err := audit.Record(ctx, tx, entries...)
		return err
	}))
	k.Number()
}

// troubled returns a kit in which a workspace has failed, with secrets where tenants put them.
func troubled(t *testing.T) *kit {
	t.Helper()
	k := newKit(t)
	for _, x := range []projecttest.Tenant{k.A, k.B} {
		k.Append(&lifecyclev1.Workspace{
			WorkspaceId: x.WorkspaceID, TenantId: x.ID, Tenant: x.Name, Name: x.WorkspaceName,
			State: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, Epoch: 1, RunId: x.RunID, NodeId: x.NodeID,
			NodeName: x.NodeName, LastError: "deploy: password=hunter22 was refused",
			LastErrorCode: "deploy_failed",
			Spec: &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{
				Name: "web", Env: map[string]string{"DB_URL": "hunter22"}, Args: []string{"--key", "hunter22"},
				Command: []string{"serve-hunter22"},
			}}},
		})
		k.Append(&lifecyclev1.StepAttempt{
			RunId: x.RunID, WorkspaceId: x.WorkspaceID, Step: 1, Name: "Allocate storage",
			Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1, State: commonv1.AttemptState_ATTEMPT_STATE_FAILED,
			Error:      "Bearer hunter22hunter22 is no good",
			ErrorCode:  "deploy_failed",
			ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_DEPLOY,
		})
		k.admitted("ana@"+x.Name, x.ID, "tenant")
		k.audited(x, audit.Entry{Action: "workspace.cancel", Reason: "stalled"},
			audit.Entry{Action: "workspace.reset", Reason: "again " + x.Name},
			audit.Entry{Action: "tenant.provisioning.failed", Outcome: audit.Failed})
	}
	k.awaitProjected()
	k.untilAudited("tenant.provisioning.failed", 2)
	return k
}

// untilAudited waits until the audit log has that many rows of an action: a log of its own beginning has others too.
func (k *kit) untilAudited(action string, rows int) {
	k.t.Helper()
	testkit.Eventually(k.t, testkit.Patience, func() error {
		var n int
		err := k.DB.Pool(pg.RoleReadmodel).QueryRow(testkit.Context(k.t), `SELECT count(*) FROM readmodel.audit
			WHERE action = $1`, action).Scan(&n)
		if err == nil && n < rows {
			err = errors.New("not all entries are in the log")
		}
		return err
	})
}

func TestEscalation(t *testing.T) {
	k := troubled(t)
	files, err := k.escalate(k.token("", "operator"), "alpha/ws-alpha")
	k.check(err)

	var manifest escalation.Manifest
	k.check(json.Unmarshal(files[escalation.FileManifest], &manifest))
	if manifest.WorkspaceID != k.A.WorkspaceID || manifest.Workspace != "alpha/ws-alpha" ||
		manifest.CollectedBy != "person@" || manifest.CollectedAt.IsZero() {
		t.Errorf("manifest: %+v", manifest)
	}
	if len(manifest.Files) != len(files)-1 {
		t.Errorf("the manifest names %d of %d files", len(manifest.Files), len(files)-1)
	}
	for _, f := range manifest.Files {
		sum := sha256.Sum256(files[f.Name])
		if raw, ok := files[f.Name]; !ok || f.Size != int64(len(raw)) || f.SHA256 != hex.EncodeToString(sum[:]) {
			t.Errorf("%s is not what the manifest says", f.Name)
		}
	}
	for name, want := range map[string][]string{
		"workspace.json": {k.A.WorkspaceID, `"env_names": [`, `"DB_URL"`}, "runs.json": {k.A.RunID},
		"timeline.json": {"Allocate storage", `"failed"`}, "tasks.json": {k.A.TaskID, `"transitions"`},
		"claims.json": {k.A.ClaimID}, "allocations.json": {k.A.AllocationID}, "instances.json": {k.A.InstanceID},
		"nodes.json": {k.A.NodeID, k.A.SessionID}, "audit.json": {"again alpha", `"hash"`},
		"policy.json": {"saga.retry_limit"}, "actions.json": {"cancel"}, "versions.json": {"lifecycle", "recovery", "schema"},
		"ids.json": {k.A.RunID, "alpha/ws-alpha", k.A.ID}, "same_name.json": {k.A.WorkspaceID},
	} {
		for _, text := range want {
			if !strings.Contains(string(files[name]), text) {
				t.Errorf("%s does not hold %q: %s", name, text, files[name])
			}
		}
	}
	var summary struct {
		LastGoodStep struct {
			Step string `json:"step"`
		} `json:"last_good_step"`
		Errors []struct {
			Step, Error string
			ErrorLayer  string `json:"error_layer"`
		} `json:"errors"`
		Tried map[string]bool `json:"tried"`
		Tries []struct{ Verb, By, Reason string }
	}
	k.check(json.Unmarshal(files["summary.json"], &summary))
	if summary.LastGoodStep.Step != "Validate request" || len(summary.Errors) != 1 ||
		summary.Errors[0].ErrorLayer != "deploy" {
		t.Errorf("summary: %s", files["summary.json"])
	}
	if !summary.Tried["cancel"] || !summary.Tried["reset"] || summary.Tried["retry"] || len(summary.Tries) != 2 ||
		summary.Tries[0].Verb != "cancel" {
		t.Errorf("what was tried: %s", files["summary.json"])
	}
	for name, raw := range files {
		if strings.Contains(string(raw), "hunter22") {
			t.Errorf("%s holds a secret", name)
		}
		for _, c := range canaries(k.B) {
			if strings.Contains(string(raw), c) {
				t.Errorf("%s holds %q of another tenant", name, c)
			}
		}
	}
	// The audit log names the person who takes a bundle.
	k.untilAudited("workspace.escalate", 1)
	list, err := readmodelv1connect.NewAuditServiceClient(k.http(k.token("", "viewer"), true), k.url()).
		ListAudit(testkit.Context(t), &readmodelv1.ListAuditRequest{Action: "workspace.escalate", Workspace: k.A.WorkspaceID})
	k.check(err)
	if len(list.GetItems()) != 1 || list.GetItems()[0].GetEntry().GetActor() != "person@" ||
		list.GetItems()[0].GetSource() != "readmodel" {
		t.Errorf("audit: %v", list)
	}
}

func TestEscalationOfATenant(t *testing.T) {
	k := troubled(t)
	own := k.token(k.A.ID, "tenant")
	for _, ref := range []string{k.B.WorkspaceID, "beta/ws-beta", "ws-beta"} {
		if _, err := k.escalate(own, ref); !fault.Has(fault.FromConnect(err), commonv1.Reason_REASON_NOT_FOUND) {
			t.Errorf("another tenant's %s: %v", ref, err)
		}
	}
	if _, err := k.escalate(k.token("", "viewer"), k.A.WorkspaceID); !fault.Has(fault.FromConnect(err),
		commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Errorf("a viewer: %v", err)
	}
	files, err := k.escalate(own, k.A.WorkspaceID)
	k.check(err)
	for name, raw := range files {
		for _, c := range append(canaries(k.B), k.Shared, "hunter22") {
			if strings.Contains(string(raw), c) {
				t.Errorf("%s holds %q", name, c)
			}
		}
	}
	if !strings.Contains(string(files["audit.json"]), "again alpha") {
		t.Errorf("the tenant's own entries are not there: %s", files["audit.json"])
	}
}

func TestEscalationNamesWhatIsMissing(t *testing.T) {
	k := troubled(t)
	k.owners.refuse(fault.New(commonv1.Reason_REASON_UNAVAILABLE, "gone fishing with password=hunter22"))
	files, err := k.escalate(k.token("", "operator"), k.A.WorkspaceID)
	k.check(err)
	var missing struct {
		Items []escalation.Gap `json:"items"`
	}
	k.check(json.Unmarshal(files[escalation.FileMissing], &missing))
	for _, what := range []string{
		"the policy in force", "which operations are possible",
		"diagnostics of the agent on box-alpha",
	} {
		i := slices.IndexFunc(missing.Items, func(g escalation.Gap) bool { return g.What == what })
		if i < 0 || missing.Items[i].Why == "" {
			t.Errorf("%q is not named: %s", what, files[escalation.FileMissing])
		}
	}
	if strings.Contains(string(files[escalation.FileMissing]), "hunter22") {
		t.Errorf("what is missing holds a secret: %s", files[escalation.FileMissing])
	}
	if _, ok := files["policy.json"]; ok {
		t.Error("a source that failed left a file")
	}
	if _, ok := files["timeline.json"]; !ok {
		t.Error("a source that failed took others with it")
	}
}
