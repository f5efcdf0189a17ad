package certificates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// TokenMissing is row 12: a machine returns with expired certificates, and without a recovery token that may be used.
func TokenMissing() kit.Drill {
	return kit.Drill{
		Name: "recovery-token-missing", Slow: true, Scale: scaleOfReturn,
		Injects: "the agent of a machine is killed and stays away until its certificates have ended; meanwhile its " +
			"recovery tokens are revoked; once more, and they are removed from its files, while those in recovery's records " +
			"are good; that of the other machine stays away until its tokens are older than " +
			"node.recovery_token_max_age_seconds; each time the agent is started again",
		Sees: "`recovery_token_missing`, the node wants an operator; the agent has recorded the cause on its host, and " +
			"opens no session",
		Recovers: "by an operator: a bundle for the node is issued, as the verdict asks for, and taken on its host; it " +
			"connects as the same instance",
		Needs: "its own mesh: a machine whose agent can be killed, and whose files can be changed",
		Expect: kit.Verdict{
			Reason: "recovery_token_missing", UserState: "operator_action_required", Owner: "operator", Next: "bundle",
		},
		Mutation: "the replicas of recovery are started anew with a rejected_fresh and a refused_fresh of a millisecond: " +
			"what the ingress refuses, and what enrolment does, is kept and over at once; the agent is killed as before, and " +
			"its connections and its token are refused",
		FailsAt: stage.Detected,
		Mutate:  act.Restarted(act.Recovery, rejectedFresh, "GPUAAS_RECOVERY_REFUSED_FRESH=1ms"),
		Run:     runTokenMissing,
	}
}

func runTokenMissing(ctx context.Context, r *kit.Run) error {
	c, err := r.Mesh.Cluster()
	if err != nil {
		return err
	}
	o, err := newAbsence(ctx, r, c)
	if o != nil {
		defer r.Finally(ctx, o.end)
	}
	if err != nil {
		return stage.At(stage.Good, err)
	}
	cases := []withoutToken{{o, consumed}}
	if r.Control == kit.None { // all begin alike
		if err := o.beside(ctx); err != nil {
			return stage.At(stage.Good, err)
		}
		cases = append(cases, withoutToken{o, absent}, withoutToken{o.other, tooOld})
	}
	if err := o.limit(ctx); err != nil {
		return stage.At(stage.Good, err)
	}
	defer r.Finally(ctx, func(ctx context.Context) { // each has its bundle, unless the drill failed
		for _, each := range o.machines() {
			if each.away {
				_ = each.takeBundle(ctx)
			}
		}
	})
	if o.other != nil { // its tokens become too old while the others are missed
		if err := o.other.kill(); err != nil {
			return stage.At(stage.Injected, err)
		}
	}
	var detected, recovered float64
	for _, each := range cases {
		if err := each.run(ctx); err != nil {
			return err
		}
		detected, recovered = max(detected, r.Result.DetectedSeconds), max(recovered, r.Result.RecoveredSeconds)
	}
	r.Result.DetectedSeconds, r.Result.RecoveredSeconds = detected, recovered
	return nil
}

// withoutToken is the drill with one way to lose the tokens; the way returns once they cannot be used and the agent has
// gone.
type withoutToken struct {
	*absence

	way func(context.Context, *absence) error
}

func (o withoutToken) run(ctx context.Context) error {
	r := o.absence.run
	o.cause, o.detail = "", ""
	r.Subject = nil
	r.About(o.held.ID, o.held.Node)
	if o.other != nil {
		r.About(o.other.held.Node)
	}
	if err := o.way(ctx, o.absence); err != nil {
		return err
	}
	if err := o.back(ctx, false); err != nil {
		return stage.At(stage.Injected, err)
	}
	if err := o.detect(ctx); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	// The other machine, which is away meanwhile, has its own turn.
	r.Result.Nodes = slices.DeleteFunc(r.Result.Nodes, func(n *readmodelv1.Node) bool {
		return n.GetReason() != r.Drill.Expect.Reason
	})
	if err := o.onHost(ctx, o.cause); err != nil {
		return stage.At(stage.Evidence, err)
	}
	if o.detail != "" {
		if err := o.shown(ctx); err != nil {
			return stage.At(stage.Evidence, err)
		}
	}
	if err := o.takeBundle(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	return r.Recovered(ctx, "the node connected as the instance that it was, admitted and normal",
		func(ctx context.Context) error {
			if err := act.Connected(ctx, r.Mesh, o.held.Node); err != nil {
				return err
			}
			node, err := r.Mesh.Node(ctx, o.held.Node)
			if now := node.GetIdentity().GetNodeInstanceId(); err == nil && now != o.instance {
				err = fmt.Errorf("the node is instance %s, was %s", now, o.instance)
			}
			r.Evidence(node.GetIdentity().GetCurrentSerial())
			return err
		})
}

// consumed has an operator revoke the tokens while the agent is away.
func consumed(ctx context.Context, o *absence) error {
	o.cause = "token_consumed"
	if err := o.leave(ctx, o.ends); err != nil {
		return err
	}
	_, err := await.Answer(ctx, "the tokens to be revoked", func(ctx context.Context) (*readmodelv1.RevokeTokensResponse,
		error,
	) {
		return o.run.Mesh.Client.Tokens.RevokeTokens(ctx,
			&readmodelv1.RevokeTokensRequest{NodeId: o.held.Node, Reason: "drill"})
	})
	return stage.At(stage.Injected, err)
}

// absent has the host lose its tokens while the agent is away. Those in recovery's records may still be used.
func absent(ctx context.Context, o *absence) error {
	o.cause, o.detail = "no recovery token is held", "the host says that it has no recovery token to send"
	if err := o.leave(ctx, o.ends); err != nil {
		return err
	}
	if err := o.removeTokens(); err != nil {
		return stage.At(stage.Injected, err)
	}
	tokens, err := o.run.Mesh.Client.Tokens.ListTokens(ctx, &readmodelv1.ListTokensRequest{NodeId: o.held.Node})
	if err == nil && !slices.ContainsFunc(tokens.GetItems(), func(t *recoveryv1.RecoveryToken) bool {
		return t.GetGoodUntil() != nil && time.Until(t.GetGoodUntil().AsTime()) > 0
	}) {
		err = fmt.Errorf("none of the node's %d tokens may be used", len(tokens.GetItems()))
	}
	return stage.At(stage.Injected, err)
}

// tooOld waits until the tokens may not be used any more: until they have the age at which the agent, which is gone by
// then, had the last of them at the latest.
func tooOld(ctx context.Context, o *absence) error {
	o.cause = "token_expired"
	age, err := time.ParseDuration(scaledToken + "s")
	if err != nil {
		return stage.At(stage.Good, err)
	}
	return o.leave(ctx, func() time.Time { return o.killedAt.Add(age) })
}

// onHost waits until the agent's record on its host names a missing token, for a cause.
func (o *absence) onHost(ctx context.Context, cause string) error {
	file := filepath.Join(o.held.Dir, "state", "diagnostics.json")
	return await.Until(ctx, "the record of "+cause, await.Limit, func(context.Context) error {
		data, err := os.ReadFile(file) // of our own mesh
		if err != nil {
			return err
		}
		var entries []struct {
			Code   string `json:"code"`
			Detail string `json:"detail"`
		}
		if err := json.Unmarshal(data, &entries); err != nil {
			return err
		}
		for _, e := range entries {
			if e.Code == "recovery_token_missing" && strings.Contains(e.Detail, cause) {
				return nil
			}
		}
		return fmt.Errorf("none of %d entries is that: %s", len(entries), data)
	})
}

// shown waits until the evidence of the verdict has a detail.
func (o *absence) shown(ctx context.Context) error {
	return await.Until(ctx, "the evidence of the verdict", await.Limit, func(ctx context.Context) error {
		node, err := o.run.Mesh.Node(ctx, o.held.Node)
		if err == nil && !slices.ContainsFunc(node.GetVerdict().GetEvidence(), func(e *recoveryv1.Evidence) bool {
			return strings.Contains(e.GetDetail(), o.detail)
		}) {
			err = fmt.Errorf("none of it is %q: %v", o.detail, node.GetVerdict().GetEvidence())
		}
		return err
	})
}

// removeTokens removes the recovery tokens from the host, whose agent does not run.
func (o *absence) removeTokens() error {
	file := filepath.Join(o.held.Dir, "etc", "node-agent.env")
	data, err := os.ReadFile(file) // of our own mesh
	if err != nil {
		return err
	}
	var kept strings.Builder
	for line := range strings.Lines(string(data)) {
		if !strings.HasPrefix(line, "GPUAAS_ENROLLMENT_TOKEN=") {
			kept.WriteString(line)
		}
	}
	if err := os.WriteFile(file, []byte(kept.String()), 0o600); err != nil {
		return err
	}
	err = os.Remove(filepath.Join(o.held.Dir, "state", "recovery-tokens.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// takeBundle issues a bundle for the node, as the next action of its verdict says, and takes it on the host.
func (o *absence) takeBundle(ctx context.Context) error {
	if err := o.held.Machine.Stop(ctx); err != nil {
		return err
	}
	key := ids.New()
	issued, err := await.Answer(ctx, "a bundle for the node", func(ctx context.Context) (*readmodelv1.IssueBundleResponse,
		error,
	) {
		return o.run.Mesh.Client.Bundles.IssueBundle(ctx, &readmodelv1.IssueBundleRequest{
			NodeId: o.held.Node, Reason: "drill", IdempotencyKey: key,
		})
	})
	if err != nil {
		return err
	}
	if _, err := o.held.Machine.TakeBundle(ctx, issued.GetArchive(), issued.GetDigest()); err != nil {
		return err
	}
	o.away = false
	return o.held.Machine.Start()
}
