package client_test

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// until collects an output and interrupts the command as soon as it contains a text.
type until struct {
	text string
	stop context.CancelFunc

	mu  sync.Mutex
	out bytes.Buffer
}

func (u *until) Write(p []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	n, err := u.out.Write(p)
	if strings.Contains(u.out.String(), u.text) {
		u.stop()
	}
	return n, err
}

// follow runs a command line until its output contains a text, then interrupts it.
func follow(t *testing.T, text string, args ...string) result {
	t.Helper()
	ctx, stop := context.WithCancel(testkit.Context(t))
	defer stop()
	out := &until{text: text, stop: stop}
	var errOut bytes.Buffer
	program := kit.New()
	root := &cobra.Command{Use: "gpuaas"}
	client.Attach(program, root)
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(&errOut)
	err := root.ExecuteContext(ctx)
	exit.Report(&errOut, err, program.JSON())
	return result{out.out.String(), errOut.String(), exit.CodeOf(err)}
}

// TestListFollows: a list with -w prints the table, then each row that changes, and nothing for what only ages; Ctrl-C
// ends it quietly with 130.
func TestListFollows(t *testing.T) {
	f := mesh(t)
	node := func(name string, connected bool, heartbeat int) *readmodelv1.Node {
		return &readmodelv1.Node{NodeId: name + "-id", Name: name, Connected: connected, LastHeartbeatAt: at(heartbeat)}
	}
	always(f, "ListNodes", &readmodelv1.ListNodesResponse{Items: []*readmodelv1.Node{
		node("a", true, 1),
		node("b", true, 1),
	}})
	f.watching(func(
		ctx context.Context, req *readmodelv1.WatchRequest, send func(*readmodelv1.WatchResponse) error,
	) error {
		if len(req.GetTopics()) != 1 || req.GetTopics()[0] != readmodelv1.Topic_TOPIC_NODES {
			t.Errorf("watches %v", req.GetTopics())
		}
		frame := func(change readmodelv1.Change, n *readmodelv1.Node) {
			item := &readmodelv1.WatchItem{
				Change: change, Id: n.GetNodeId(), Topic: readmodelv1.Topic_TOPIC_NODES,
				Object: &readmodelv1.WatchItem_Node{Node: n},
			}
			if err := send(&readmodelv1.WatchResponse{Frame: &readmodelv1.WatchResponse_Item{Item: item}}); err != nil {
				t.Log(err)
			}
		}
		frame(readmodelv1.Change_CHANGE_SNAPSHOT, node("a", true, 1))
		frame(readmodelv1.Change_CHANGE_SNAPSHOT, node("b", true, 2)) // heard again: no change
		if err := send(
			&readmodelv1.WatchResponse{
				Frame: &readmodelv1.WatchResponse_Bootstrapped{Bootstrapped: &readmodelv1.Bootstrapped{Total: 2}},
			},
		); err != nil {
			t.Log(err)
		}
		frame(readmodelv1.Change_CHANGE_UPDATED, node("a", false, 2))
		frame(readmodelv1.Change_CHANGE_UPDATED, node("a", false, 3))
		frame(readmodelv1.Change_CHANGE_CREATED, node("zulu", true, 3))
		<-ctx.Done()
		return ctx.Err()
	})
	got := follow(t, "zulu", "nodes", "list", "-w")
	names := func(out string) []string {
		var rows []string
		for line := range strings.Lines(out) {
			fields := strings.SplitN(line, "\t", 3)
			rows = append(rows, strings.Join(fields[:min(2, len(fields))], " "))
		}
		return rows
	}
	want := []string{"NAME CONNECTED", "a yes", "b yes", "a no", "zulu yes"}
	if diff := cmp.Diff(want, names(got.out)); diff != "" || got.code != 130 || got.err != "interrupted\n" {
		t.Errorf("exit %d, stderr %q, rows (-want +got):\n%s", got.code, got.err, diff)
	}
	// An item that the filter now excludes is printed once as it is now.
	if got := follow(t, "zulu", "nodes", "list", "-w", "--connected"); cmp.Diff(want, names(got.out)) != "" ||
		got.code != 130 {
		t.Errorf("filtered: exit %d, %q", got.code, got.out)
	}
	got = follow(t, "zulu", "nodes", "list", "-w", "-o", "jsonl")
	if n := strings.Count(got.out, "\n"); n != 6 || got.code != 130 || !strings.Contains(got.err, `"reason":"cancelled"`) {
		t.Errorf("%d lines of JSON, exit %d: %s%s", n, got.code, got.out, got.err)
	}
	for line := range strings.Lines(got.out) {
		var object map[string]any
		decode(t, line, &object)
		if object["name"] == nil {
			t.Errorf("%s is no node", line)
		}
	}
	if got := follow(t, "zulu", "nodes", "list", "-w", "-o", "name"); got.out != "a\nb\na\nzulu\n" {
		t.Errorf("names: %q", got.out)
	}
	for _, line := range []string{"nodes list -w -o json", "nodes list -w --jq .", "nodes list -w --page-token x"} {
		call(t, strings.Fields(line)...).wants(t, 2)
	}
}

// TestListFollowsWithoutAWatch: a list without a watch is polled, and only the rows that changed are printed.
func TestListFollowsWithoutAWatch(t *testing.T) {
	f := mesh(t)
	asked := 0
	answer(f, "ListClaims", func(req *readmodelv1.ListClaimsRequest) (*readmodelv1.ListClaimsResponse, error) {
		asked++
		items := []*lifecyclev1.Claim{
			{ClaimId: claimID, Kind: "slot", Name: "one"},
			{ClaimId: instanceID, Kind: "slot", Name: "two"},
		}
		if asked > 1 {
			if req.GetPageSize() != 200 || req.GetPageToken() != "" {
				t.Errorf("asked for %v", req)
			}
			items[1].OrphanedAt = at(3)
			items = append([]*lifecyclev1.Claim{{
				ClaimId: taskID, Kind: "slot", Name: "newest",
				Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED,
			}}, items...)
		}
		return &readmodelv1.ListClaimsResponse{Items: items}, nil
	})
	got := follow(t, "newest", "claims", "list", "-w")
	var rows []string
	for line := range strings.Lines(got.out) {
		fields := strings.Split(line, "\t")
		rows = append(rows, fields[2]+" "+fields[4])
	}
	want := []string{"NAME STATE", "one intended", "two intended", "two orphaned", "newest intended"}
	if diff := cmp.Diff(want, rows); diff != "" || got.code != 130 || got.err != "interrupted\n" {
		t.Errorf("exit %d, stderr %q, rows (-want +got):\n%s", got.code, got.err, diff)
	}
}

// TestListsWithoutPagesFollow: lists that are never longer than one page are followed like any other.
func TestListsWithoutPagesFollow(t *testing.T) {
	f := mesh(t)
	keys := []*recoveryv1.SigningKey{{Kind: recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, KeyId: "first"}}
	answer(f, "ListKeys", func(*readmodelv1.ListKeysRequest) (*readmodelv1.ListKeysResponse, error) {
		listed := &readmodelv1.ListKeysResponse{Keys: keys}
		keys = append([]*recoveryv1.SigningKey{{Kind: recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, KeyId: "second"}}, keys[:1]...)
		return listed, nil
	})
	if got := follow(t, "second", "keys", "list", "-w", "-o", "name"); got.out != "first\nsecond\n" {
		t.Errorf("keys:\n%s", got.out)
	}
	phase := recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED
	answer(f, "ListProfiles", func(*readmodelv1.ListProfilesRequest) (*readmodelv1.ListProfilesResponse, error) {
		listed := &readmodelv1.ListProfilesResponse{Items: []*recoveryv1.ProfileVersion{
			{Profile: &commonv1.Profile{Name: "default", Version: 1}, Phase: phase},
		}}
		phase = recoveryv1.ProfilePhase_PROFILE_PHASE_ACTIVE
		return listed, nil
	})
	got := follow(t, `"active"`, "profiles", "list", "-w", "-o", "jsonl")
	if strings.Count(got.out, "\n") != 2 || !strings.Contains(got.out, `"phase":"announced"`) {
		t.Errorf("profiles:\n%s", got.out)
	}
	call(t, "keys", "list", "-w", "-o", "json").wants(t, 2)
}
