package workspaces

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/yaml"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/operations"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/showable"
)

// specFlags are the flags that describe a workspace without a file.
type specFlags struct {
	flags                     *pflag.FlagSet
	file                      string
	image, workload           string
	command, args, ports, env []string
	ready                     string
	minUptime                 time.Duration
	gpus                      int32
	storage, placement        string
	plan, region              string
}

func (f *specFlags) add(flags *pflag.FlagSet) {
	f.flags = flags
	flags.StringVar(&f.file, "spec", "",
		"file with the spec, YAML or JSON (- reads standard input); the other flags change it")
	flags.StringVar(&f.image, "image", "", "image of the workload, for container runtimes")
	flags.StringVar(&f.workload, "workload", "main", "name of the workload")
	flags.StringArrayVar(&f.command, "command", nil, "one word of the workload's command; repeat it for more")
	flags.StringArrayVar(&f.args, "arg", nil, "one argument of the workload; repeat it for more")
	flags.StringArrayVar(&f.ports, "port", nil,
		"[NAME=]PORT that the workload listens on; 0 picks one and gives it as PORT; repeat it for more")
	flags.StringArrayVar(&f.env, "env", nil,
		"NAME=VALUE in the workload's environment, the place for secrets: the value is stored encrypted and never shown; "+
			"repeat it for more. "+
			"LD_* and CUDA_VISIBLE_DEVICES are forbidden; GPUAAS_*, DATABASE_URL, PGSCHEMA and the variables of its ports "+
			"are the platform's")
	flags.StringVar(&f.ready, "ready-path", "",
		"the workload is ready when GET of this path on its first port succeeds; without it, when that port takes a "+
			"connection")
	flags.DurationVar(&f.minUptime, "min-uptime", 0,
		"the workload is ready only once it has run for this long, at most 5m (default 2s without --port, 0s with one)")
	flags.Int32Var(&f.gpus, "gpus", 0, "GPUs, exclusively, from 0 to 64")
	flags.StringVar(&f.storage, "storage", "", "storage, such as 10Gi")
	flags.StringVar(&f.placement, "placement", "",
		"where the workspace runs: "+strings.Join(names.Spellings[commonv1.PlacementDriver](), ", ")+" (default: the mesh's)")
	flags.StringVar(&f.plan, "plan", "", "plan (default: the mesh's)")
	flags.StringVar(&f.region, "region", "", "region (default: the mesh's)")
}

// spec returns the spec that the flags describe. changed reports whether a flag was given.
func (f *specFlags) spec(changed func(string) bool, stdin io.Reader) (*lifecyclev1.WorkspaceSpec, error) {
	spec := &lifecyclev1.WorkspaceSpec{}
	if f.file != "" {
		data, err := readSpec(f.file, stdin)
		if err != nil {
			return nil, err
		}
		if spec, err = parseSpec(data); err != nil {
			return nil, exit.Usage(fmt.Errorf("--spec %s: %w", f.file, err))
		}
	}
	var err error
	if changed("gpus") {
		spec.Gpus = f.gpus
	}
	if f.storage != "" {
		if spec.StorageBytes, err = human.ParseBytes(f.storage); err != nil {
			return nil, exit.Usage(fmt.Errorf("--storage: %w", err))
		}
	}
	if f.placement != "" {
		if spec.Placement, err = kit.ParseEnum[commonv1.PlacementDriver]("placement", f.placement); err != nil {
			return nil, err
		}
	}
	spec.Plan, spec.Region = cmp.Or(f.plan, spec.GetPlan()), cmp.Or(f.region, spec.GetRegion())
	workload, err := f.parseWorkload(changed)
	switch {
	case err != nil:
		return nil, exit.Usage(err)
	case workload != nil && len(spec.GetWorkloads()) > 0:
		return nil, exit.Usage(errors.New("--spec has workloads already: --image, --command, --arg, --port, --env, " +
			"--ready-path and --min-uptime describe another"))
	case workload != nil:
		spec.Workloads = []*nodev1.Workload{workload}
	}
	return spec, nil
}

// parseWorkload returns the workload that the flags describe; nil if none of them was given. A wrong value is an error
// even where the flag that names the workload's program is missing.
func (f *specFlags) parseWorkload(changed func(string) bool) (*nodev1.Workload, error) {
	ports, err := f.parsePorts()
	if err != nil {
		return nil, err
	}
	env, err := f.parseEnv()
	if err != nil {
		return nil, err
	}
	if f.minUptime < 0 || f.minUptime > maxMinUptime {
		return nil, kit.WrongFlag(f.flags, "min-uptime", fmt.Sprintf("%s: it is from 0s to %s", f.minUptime, maxMinUptime))
	}
	if f.image == "" && len(f.command) == 0 {
		if len(f.args)+len(ports)+len(env) > 0 || f.ready != "" || changed("min-uptime") {
			return nil, errors.New("--arg, --port, --env, --ready-path and --min-uptime belong to a workload: name --image " +
				"or --command")
		}
		return nil, nil
	}
	w := &nodev1.Workload{
		Name: f.workload, Image: f.image, Command: f.command, Args: f.args, Ports: ports, Env: env,
	}
	if f.ready != "" {
		if len(w.GetPorts()) == 0 {
			return nil, errors.New("--ready-path asks the first port: name one with --port")
		}
		w.Readiness = &nodev1.Readiness{HttpPath: f.ready}
	} else if len(w.GetPorts()) > 0 {
		// That the process runs does not mean that its port accepts connections, so readiness is a TCP connection.
		w.Readiness = &nodev1.Readiness{Tcp: true}
	}
	if changed("min-uptime") {
		if w.GetReadiness() == nil {
			w.Readiness = &nodev1.Readiness{}
		}
		w.Readiness.MinUptime = durationpb.New(f.minUptime)
	}
	return w, nil
}

func (f *specFlags) parsePorts() ([]*nodev1.Port, error) {
	var ports []*nodev1.Port
	for i, text := range f.ports {
		name, port, ok := strings.Cut(text, "=")
		if !ok {
			name, port = "http", text
			if i > 0 {
				name = "port-" + strconv.Itoa(i+1)
			}
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			if errors.Is(err, strconv.ErrRange) {
				return nil, kit.WrongFlag(f.flags, "port", fmt.Sprintf("%q: a port is from 0 to 65535", text))
			}
			return nil, kit.WrongFlag(f.flags, "port",
				fmt.Sprintf("%q is not [NAME=]PORT, with a port from 0 to 65535", text))
		}
		ports = append(ports, &nodev1.Port{Name: name, Port: int32(n)}) // parsed as 16 bits
	}
	return ports, nil
}

func (f *specFlags) parseEnv() (map[string]string, error) {
	env := map[string]string{}
	for _, text := range f.env {
		name, value, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return nil, kit.WrongFlag(f.flags, "env", "needs NAME=VALUE")
		}
		if _, twice := env[name]; twice {
			return nil, kit.WrongFlag(f.flags, "env", fmt.Sprintf("names %s twice", showable.Clean([]byte(name))))
		}
		env[name] = value
	}
	return env, nil
}

const (
	maxSpec      = 1 << 20
	maxMinUptime = 5 * time.Minute
)

func readSpec(path string, stdin io.Reader) ([]byte, error) {
	if path != "-" {
		data, err := pki.ReadFile(path)
		if err != nil {
			return nil, exit.Usage(fmt.Errorf("--spec: %w", err))
		}
		return data, nil
	}
	data, err := io.ReadAll(io.LimitReader(stdin, maxSpec+1))
	if err != nil {
		return nil, exit.Usage(fmt.Errorf("--spec: %w", err))
	}
	if len(data) > maxSpec {
		return nil, exit.Usage(fmt.Errorf("--spec: larger than %d bytes", maxSpec))
	}
	return data, nil
}

// parseSpec parses a spec in the format in which the API prints it, in YAML or JSON. `storage: 10Gi` may stand for
// storage_bytes.
func parseSpec(data []byte) (*lifecyclev1.WorkspaceSpec, error) {
	raw, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return nil, fmt.Errorf("not YAML: %w", err)
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, errors.New("not an object with the fields of a workspace's spec")
	}
	if given, ok := fields["storage"]; ok {
		if _, both := fields["storage_bytes"]; both {
			return nil, errors.New("storage and storage_bytes are one thing: give one of them")
		}
		n, err := human.ParseBytes(strings.Trim(string(given), `"`))
		if err != nil {
			return nil, fmt.Errorf("storage: %w", err)
		}
		delete(fields, "storage")
		fields["storage_bytes"] = json.RawMessage(human.Number(n))
		if raw, err = json.Marshal(fields); err != nil {
			return nil, fmt.Errorf("storage: %w", err)
		}
	}
	return names.Unmarshal[*lifecyclev1.WorkspaceSpec](raw)
}

func createCommand(p *kit.Program) *cobra.Command {
	var (
		spec    specFlags
		req     = &readmodelv1.CreateWorkspaceRequest{}
		wait    bool
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use: "create NAME --tenant T", Short: "Provision a workspace, or join the provisioning of the same one",
		Long: "Provision a workspace. Without a spec it runs the built-in demo workload.\n" +
			"Asking again for the same name with the same spec joins the operation under way; with another spec it is " +
			"refused.\n\n" +
			"Values of --env, and of env in --spec, are secrets: they are stored encrypted, given to the agent that runs the " +
			"workload, and not shown\n" +
			"again. Their names are shown. What a workload prints of them is masked in its output, but for values shorter " +
			"than four bytes: those are printed as\n" +
			"they are. Everything else is public: commands and arguments (--command, --arg) are stored as they are given and " +
			"shown to\n" +
			"everybody who may read the workspace, so keep secrets out of them.\n\n" +
			"A workload is ready when its port takes a connection or its --ready-path succeeds; one without a port is ready " +
			"once it has run for 2 s. --min-uptime\n" +
			"changes how long it must have run (in --spec: min_uptime of readiness). What exits sooner was not ready. What " +
			"follows is said by its\n" +
			"restart_policy (in --spec): on_failure, the default, restarts it unless it exited with status 0; always " +
			"restarts it; never leaves it.",
		Example: "  gpuaas workspaces create demo2 --tenant acme --wait\n" +
			"  gpuaas workspaces create web --tenant acme --command python3 --arg -m --arg http.server --arg 8080 --port " +
			"8080 --gpus 1 --storage 10Gi\n" +
			"  gpuaas workspaces create train --tenant acme --spec workspace.yaml --placement static",
		Args: kit.Args("NAME"),
	}
	cmd.RunE = p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
		if req.GetTenant() == "" {
			return exit.Usage(errors.New("gpuaas workspaces create needs --tenant T, or $GPUAAS_TENANT: `gpuaas tenants " +
				"list` shows those that exist"))
		}
		var err error
		if req.Spec, err = spec.spec(cmd.Flags().Changed, cmd.InOrStdin()); err != nil {
			return err
		}
		req.Name = args[0]
		answer, err := s.Command.CreateWorkspace(ctx, req)
		if err != nil {
			return err
		}
		op := answer.GetOperation()
		if wait && !op.GetDryRun() {
			return awaitOperation(ctx, s, op, req.GetTenant()+"/"+req.GetName(), commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
				timeout)
		}
		if s.Structured() || s.Format == output.FormatName {
			return operations.Print(ctx, s, op, "")
		}
		return operations.Print(ctx, s, op, s.TenantName(ctx, req.GetTenant())+"/"+req.GetName())
	})
	flags := cmd.Flags()
	flags.StringVar(&req.Tenant, "tenant", os.Getenv("GPUAAS_TENANT"), "tenant that it belongs to ($GPUAAS_TENANT)")
	flags.StringVar(&req.IdempotencyKey, "idempotency-key", "",
		"a repeated request with the same `key` gets the same operation")
	flags.BoolVar(&req.DryRun, "dry-run", false, "only show what it would do, or what stands in the way")
	flags.BoolVar(&wait, "wait", false,
		"print each step, wait until the workspace is active, and print it with its endpoints")
	flags.DurationVar(&timeout, "timeout", 10*time.Minute,
		"give up waiting after this long (exit 6); the operation goes on; 0 waits without end")
	spec.add(flags)
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.CompleteTenants)
	_ = cmd.RegisterFlagCompletionFunc("placement",
		cobra.FixedCompletions(names.Spellings[commonv1.PlacementDriver](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
