package drill

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// tokenMissing is row 12: a machine returns with expired certificates and a recovery token that is too old.
func tokenMissing() kit.Drill {
	return kit.Drill{
		Name: "recovery-token-missing", Slow: true,
		Injects: "the agent of a machine is killed and stays away until its certificates have ended and its recovery " +
			"token is older than node.recovery_token_max_age_seconds; then it is started again",
		Sees: "`recovery_token_missing`, the node wants an operator; the agent has recorded it on its host, and has made " +
			"no more attempts than the policy allows",
		Recovers: "by an operator's bundle, after the token was removed from the file as well: no request is made without " +
			"one; the node connects as a new instance",
		Needs: "its own mesh: a machine whose agent can be killed",
		Expect: kit.Verdict{
			Reason: "recovery_token_missing", UserState: "operator_action_required", Owner: "operator", Next: "bundle",
		},
		Mutation: "the replicas of recovery, which conclude verdicts, are stopped before the agent returns; the agent is " +
			"killed as before",
		FailsAt: stage.Detected,
		Scale:   2, // a token of the shortest age that a policy allows must grow older than that
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
		defer o.end(context.WithoutCancel(ctx))
	}
	if err != nil {
		return stage.At(stage.Good, err)
	}
	age := r.Policy.RecoveryTokenMaxAge()
	if r.Mesh.Scaled {
		if age, err = time.ParseDuration(scaledToken + "s"); err != nil {
			return stage.At(stage.Good, err)
		}
	}
	if err := o.leave(ctx, func() time.Time { return time.Now().Add(age) }); err != nil {
		return err
	}
	if r.Control == kit.Mutated {
		defer signal(c.Recovery, syscall.SIGCONT)
		signal(c.Recovery, syscall.SIGSTOP)
	}
	if err := o.held.Machine.Start(); err != nil {
		return stage.At(stage.Injected, err)
	}
	if err := o.detect(ctx); err != nil {
		return err
	}
	if err := r.Check(ctx); err != nil {
		return err
	}
	state := filepath.Join(o.held.Dir, "state")
	if err := onHost(ctx, state, "token_expired"); err != nil {
		return stage.At(stage.Evidence, err)
	}
	// The variant without any token: nothing is sent, and the host's record alone tells.
	if err := o.withoutToken(ctx); err != nil {
		return stage.At(stage.Evidence, err)
	}
	if err := o.bundle(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node connected as a new instance, admitted and normal", func(ctx context.Context) error {
		return connected(ctx, r.Mesh, o.held.Node)
	})
	if err != nil {
		return err
	}
	node, err := r.Mesh.Node(ctx, o.held.Node)
	if err != nil {
		return stage.At(stage.Evidence, err)
	}
	if now := node.GetIdentity().GetNodeInstanceId(); now == o.instance {
		return stage.At(stage.Evidence, errors.New("the node is the instance that it was"))
	}
	r.Evidence(node.GetIdentity().GetNodeInstanceId())
	return nil
}

// onHost waits until the agent's record on its host names a missing token, for a cause.
func onHost(ctx context.Context, state, cause string) error {
	return await.Until(ctx, "the record of "+cause, await.Settle, func(context.Context) error {
		data, err := os.ReadFile(filepath.Join(state, "diagnostics.json"))
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
		return fmt.Errorf("%d records, and none of it", len(entries))
	})
}

// withoutToken removes the recovery tokens from the host while its agent is away.
func (o *absence) withoutToken(ctx context.Context) error {
	if err := o.held.Machine.Stop(ctx); err != nil {
		return err
	}
	path := filepath.Join(o.held.Dir, "etc", "node-agent.env")
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var kept []string
	for line := range strings.Lines(string(data)) {
		if !strings.HasPrefix(line, "GPUAAS_ENROLLMENT_TOKEN=") {
			kept = append(kept, line)
		}
	}
	if err := os.WriteFile(path, []byte(strings.Join(kept, "")), 0o600); err != nil {
		return err
	}
	tokens := filepath.Join(o.held.Dir, "state", "recovery-tokens.json")
	if err := os.Remove(tokens); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := o.held.Machine.Start(); err != nil {
		return err
	}
	return onHost(ctx, filepath.Join(o.held.Dir, "state"), "no recovery token is held")
}

// bundle gives the machine an operator's token.
func (o *absence) bundle(ctx context.Context) error {
	if err := o.held.Machine.Stop(ctx); err != nil {
		return err
	}
	resp, err := await.Answer(ctx, "a token for "+o.held.Machine.Name(),
		func(ctx context.Context) (*readmodelv1.EnrollNodeResponse, error) {
			return o.run.Mesh.Client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: o.held.Machine.Name()})
		})
	if err != nil {
		return err
	}
	if err := o.held.Machine.Furnish(resp.GetToken()); err != nil {
		return err
	}
	return o.held.Machine.Start()
}
