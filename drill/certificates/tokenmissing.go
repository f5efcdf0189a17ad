package certificates

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
	"github.com/gpuaas/mesh/drill/kit/act"
	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// TokenMissing is row 12: a machine returns with expired certificates, and without a recovery token that may be used.
func TokenMissing() kit.Drill {
	return kit.Drill{
		Name: "recovery-token-missing", Slow: true, Scale: scaleOfReturn,
		Injects: "the agent of a machine is killed and stays away until its certificates have ended; its recovery tokens " +
			"are revoked meanwhile; once more it stays away until they are older than node.recovery_token_max_age_seconds, " +
			"and then they are removed from its files; each time it is started again",
		Sees: "`recovery_token_missing`, the node wants an operator; the agent has recorded the cause on its host, and " +
			"opens no session",
		Recovers: "by an operator: the node is put on hold, and the machine enrolled with a token for its name; it " +
			"connects as another instance",
		Needs: "its own mesh: a machine whose agent can be killed, and whose files can be changed",
		Expect: kit.Verdict{
			Reason: "recovery_token_missing", UserState: "operator_action_required", Owner: "operator", Next: "bundle",
		},
		Mutation: "the replicas of recovery, which conclude verdicts, are stopped before the agent returns; the agent is " +
			"killed as before, and its connections are refused",
		FailsAt: stage.Detected,
		Run:     runTokenMissing,
	}
}

func runTokenMissing(ctx context.Context, r *kit.Run) error {
	if _, err := r.Mesh.Cluster(); err != nil {
		return err
	}
	ways := []func(context.Context, *absence) error{revoked, tooOld}
	if r.Control != kit.None {
		ways = ways[:1] // both begin alike
	}
	var detected, recovered float64
	for _, way := range ways {
		r.Subject = nil
		if err := withoutToken(ctx, r, way); err != nil {
			return err
		}
		detected, recovered = max(detected, r.Result.DetectedSeconds), max(recovered, r.Result.RecoveredSeconds)
	}
	r.Result.DetectedSeconds, r.Result.RecoveredSeconds = detected, recovered
	return nil
}

// withoutToken is the drill with one way to lose the tokens; the way returns once they cannot be used and the agent has
// gone.
func withoutToken(ctx context.Context, r *kit.Run, way func(context.Context, *absence) error) error {
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
	defer r.Finally(ctx, func(ctx context.Context) { // it was enrolled, unless the drill failed
		if o.anew || r.Control == kit.Withheld {
			return
		}
		_ = o.enrolAnew(ctx)
	})
	if err := way(ctx, o); err != nil {
		return err
	}
	if r.Control == kit.Mutated {
		defer act.Signal(c.Recovery, syscall.SIGCONT)
		act.Signal(c.Recovery, syscall.SIGSTOP)
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
	if err := o.onHost(ctx, o.cause); err != nil {
		return stage.At(stage.Evidence, err)
	}
	if o.absent {
		if err := o.removeTokens(ctx); err != nil {
			return stage.At(stage.Evidence, err)
		}
	}
	if err := o.enrolAnew(ctx); err != nil {
		return stage.At(stage.Recover, err)
	}
	err = r.Recovered(ctx, "the node connected as another instance, admitted and normal", func(ctx context.Context) error {
		if err := act.Connected(ctx, r.Mesh, o.held.Node); err != nil {
			return err
		}
		node, err := r.Mesh.Node(ctx, o.held.Node)
		if now := node.GetIdentity().GetNodeInstanceId(); err == nil && now == o.instance {
			err = errors.New("the node is the instance that it was")
		}
		r.Evidence(node.GetIdentity().GetNodeInstanceId())
		return err
	})
	return err
}

// revoked has an operator revoke the tokens while the agent is away.
func revoked(ctx context.Context, o *absence) error {
	o.cause = "token_consumed"
	if err := o.leave(ctx, func() time.Time { return o.ends() }); err != nil {
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

// tooOld waits until the tokens may not be used any more. They are removed from the host afterwards.
func tooOld(ctx context.Context, o *absence) error {
	o.cause, o.absent = "token_expired", true
	age, err := time.ParseDuration(scaledToken + "s")
	if err != nil {
		return stage.At(stage.Good, err)
	}
	until := time.Now().Add(age)
	return o.leave(ctx, func() time.Time { return until })
}

// onHost waits until the agent's record on its host names a missing token, for a cause.
func (o *absence) onHost(ctx context.Context, cause string) error {
	file := filepath.Join(o.held.Dir, "state", "diagnostics.json")
	return await.Until(ctx, "the record of "+cause, await.Settle, func(context.Context) error {
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

// removeTokens removes the recovery tokens from the host, and starts the agent without them.
func (o *absence) removeTokens(ctx context.Context) error {
	if err := o.held.Machine.Stop(ctx); err != nil {
		return err
	}
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
	if err := os.Remove(filepath.Join(o.held.Dir, "state", "recovery-tokens.json")); err != nil &&
		!errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := o.held.Machine.Start(); err != nil {
		return err
	}
	return o.onHost(ctx, "no recovery token is held")
}

// enrolAnew puts the node on hold, as an operator does, and gives the machine a token for its name.
func (o *absence) enrolAnew(ctx context.Context) error {
	if err := o.held.Machine.Stop(ctx); err != nil {
		return err
	}
	if _, err := act.Change(ctx, o.run.Mesh, o.held.Node, recoveryv1.IdentityVerb_IDENTITY_VERB_HOLD); err != nil {
		return err
	}
	resp, err := await.Answer(ctx, "a token for "+o.held.Machine.Name(),
		func(ctx context.Context) (*readmodelv1.EnrollNodeResponse, error) {
			return o.run.Mesh.Client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{Name: o.held.Machine.Name()})
		})
	if err != nil {
		return err
	}
	o.anew = true
	return errors.Join(o.held.Machine.Furnish(resp.GetToken()), o.held.Machine.Start())
}
