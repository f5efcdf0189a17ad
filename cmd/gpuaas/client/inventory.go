package client

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

var tenantView = view[*lifecyclev1.Tenant]{
	name: (*lifecyclev1.Tenant).GetName,
	columns: []column[*lifecyclev1.Tenant]{
		{title: "NAME", path: "name"},
		{title: "WORKSPACES", drop: 1, path: "quota.workspaces"},
		{title: "GPUS", drop: 2, path: "quota.gpus"},
		{title: "STORAGE", drop: 3, path: "quota.storage_bytes", as: inBytes},
		{title: "CREATED", drop: 4, moves: true, path: "created_at"},
		{title: "ID", path: "tenant_id", wide: true},
	},
}

func tenantsCommand(p *Program) *cobra.Command {
	var quota struct {
		workspaces, gpus int32
		storage          string
	}
	create := &cobra.Command{
		Use: "create NAME", Short: "Make a tenant with its quota; one that exists is left as it is",
		Example: "  gpuaas tenants create acme --workspaces 10 --gpus 8 --storage 1Ti",
		Args:    args("NAME"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			bytes, err := parseBytes(quota.storage)
			if err != nil {
				return Usage(fmt.Errorf("--storage: %w", err))
			}
			answer, err := s.command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
				Name: args[0], Quota: &lifecyclev1.Quota{Workspaces: quota.workspaces, Gpus: quota.gpus, StorageBytes: bytes},
			})
			if err != nil {
				return err
			}
			return one(s.printer, tenantView, answer.GetTenant(), with("existed", answer.GetExisted()),
				with("pos", answer.GetPos()))
		}),
	}
	create.Flags().Int32Var(&quota.workspaces, "workspaces", 100, "workspaces that it may have at once")
	create.Flags().Int32Var(&quota.gpus, "gpus", 64, "GPUs that it may hold at once")
	create.Flags().StringVar(&quota.storage, "storage", "1Ti", "storage that it may hold at once")

	var page paging
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tenants with their quotas", Example: "  gpuaas tenants list",
		Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			return show(ctx, s, page, source[*lifecyclev1.Tenant]{view: tenantView, fetch: tenants(s)})
		}),
	}
	page.flags(ls)
	get := &cobra.Command{
		Use: "get TENANT", Short: "Show one tenant", Example: "  gpuaas tenants get acme", Args: args("TENANT"),
		ValidArgsFunction: onlyFirst(p.completeTenants),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			items, _, err := pages(0, "", func(size int32, token string) ([]*lifecyclev1.Tenant, string, error) {
				return tenants(s)(ctx, size, token)
			})
			if err != nil {
				return err
			}
			ref := args[0]
			of := func(t *lifecyclev1.Tenant) bool { return t.GetName() == ref || t.GetTenantId() == ref }
			at := slices.IndexFunc(items, of)
			if at < 0 { // a part of an id
				if ref, err = s.tenantID(ctx, ref); err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
					return err
				}
				at = slices.IndexFunc(items, of)
			}
			if at < 0 {
				return fault.New(commonv1.Reason_REASON_TENANT_UNKNOWN, fmt.Sprintf("there is no tenant %q", args[0]))
			}
			return one(s.printer, tenantView, items[at])
		}),
	}
	return group("tenants", "Tenants and their quotas", []string{"tenant"}, create, ls, get)
}

// tenants returns a function that reads a page of the tenants.
func tenants(s *session) func(context.Context, int32, string) ([]*lifecyclev1.Tenant, string, error) {
	return func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Tenant, string, error) {
		answer, err := s.query.ListTenants(ctx, &readmodelv1.ListTenantsRequest{PageSize: size, PageToken: token})
		return answer.GetItems(), answer.GetNextPageToken(), err
	}
}

var instanceView = view[*lifecyclev1.Instance]{
	name: (*lifecyclev1.Instance).GetInstanceId,
	columns: []column[*lifecyclev1.Instance]{
		{title: "INSTANCE", id: true, path: "instance_id"},
		{title: "WORKSPACE", id: true, of: func(_ *printer, i *lifecyclev1.Instance) string { return instanceWorkspace(i) }},
		{title: "EPOCH", drop: 5, path: "epoch"},
		{title: "STATE", path: "state"},
		{title: "PLACEMENT", drop: 4, path: "placement"},
		{title: "PROVIDER ID", drop: 2, path: "provider_id"},
		{title: "STARTED", drop: 3, moves: true, path: "started_at"},
		{title: "ENDED", drop: 6, moves: true, path: "ended_at"},
		{title: "NODE", path: "node_name|node_id", wide: true},
		{title: "WORKSPACE ID", path: "workspace_id", wide: true},
		{title: "NODE ID", path: "node_id", wide: true},
		{title: "WHY ENDED", path: "end_reason", wide: true},
	},
}

// instanceWorkspace returns the workspace of an instance. For an instance that no workspace accounts for it returns the
// name that the placement gives.
func instanceWorkspace(i *lifecyclev1.Instance) string {
	switch {
	case !i.GetUnaccounted():
		return cmp.Or(i.GetWorkspace(), i.GetWorkspaceName())
	case i.GetWorkspaceName() == "":
		return "unknown (" + i.GetWorkspaceId() + ")"
	default:
		return i.GetWorkspaceName() + " (epoch unknown)"
	}
}

// endInstanceCommand returns the command that ends an instance that its placement runs and that no workspace accounts
// for.
func endInstanceCommand(p *Program) *cobra.Command {
	req := &lifecyclev1.EndInstanceRequest{}
	cmd := &cobra.Command{
		Use: "end INSTANCE", Short: "End an instance that its placement runs and whose workspace is not known here; its data is lost",
		Long: "End an instance that its placement runs and that this mesh cannot account for, as `gpuaas instances list` shows it with an unknown workspace:\n" +
			"after a restore, for example, what was launched after the backup. INSTANCE is its id or the provider's. An instance of a workspace that is in use\n" +
			"is refused: recreating or decommissioning the workspace ends it.",
		Example: "  gpuaas instances end 0192f0c1-0000-7000-8000-000000000001 --reason 'launched after the backup' --yes",
		Args:    args("INSTANCE"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			// Only the placement may know an instance that no workspace accounts for, so a reference that is not found goes to
			// the owner as it is.
			instance, err := s.id(ctx, kindInstance, args[0])
			if fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
				instance, err = args[0], nil
			}
			if err != nil {
				return err
			}
			req.Instance = instance
			if err := s.confirmed(ctx, losesInstance(s, req)); err != nil {
				return err
			}
			answer, err := s.client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{Request: req})
			if err != nil {
				return err
			}
			if req.GetDryRun() {
				note(s.err, "dry run, nothing was changed: it %s", clean(answer.GetResponse().GetConsequence()))
			} else {
				note(s.err, "the instance %s has been ended, with everything that ran on it; its data is lost",
					clean(req.GetInstance()))
			}
			return one(s.printer, instanceView, answer.GetResponse().GetInstance(), with("pos", answer.GetResponse().GetPos()))
		}),
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	asks(cmd)
	reasonFlag(cmd, &req.Reason, true)
	return cmd
}

// losesInstance returns the question about an instance, with the mesh's text about what its end would do.
func losesInstance(s *session, req *lifecyclev1.EndInstanceRequest) func(context.Context) (question, error) {
	return func(ctx context.Context) (question, error) {
		dry := proto.CloneOf(req)
		dry.DryRun = true
		answer, err := s.client.Instances.EndInstance(ctx, &readmodelv1.EndInstanceRequest{Request: dry})
		if err != nil {
			return question{}, err
		}
		return question{name: req.GetInstance(), lost: []string{
			fmt.Sprintf("The instance %s will be ended for good: what runs in it stops, and its data is lost.",
				req.GetInstance()),
			"Ending it " + answer.GetResponse().GetConsequence() + ".",
		}}, nil
	}
}

func instancesCommand(p *Program) *cobra.Command {
	var (
		page      paging
		workspace string
		live      bool
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List live and ended instances with their workspace, epoch and provider id; `unknown` is a workspace that this mesh does not know", Example: "  gpuaas instances list --workspace acme/demo2 --live", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			id, err := s.workspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return show(ctx, s, page, source[*lifecyclev1.Instance]{
				view: instanceView, topic: readmodelv1.Topic_TOPIC_INSTANCES, changed: (*readmodelv1.WatchItem).GetInstance,
				keep: func(i *lifecyclev1.Instance) bool {
					return (id == "" || i.GetWorkspaceId() == id) &&
						(!live || i.GetState() != commonv1.InstanceState_INSTANCE_STATE_ENDED)
				},
				fetch: func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Instance, string, error) {
					answer, err := s.query.ListInstances(ctx,
						&readmodelv1.ListInstancesRequest{PageSize: size, PageToken: token, WorkspaceId: id, LiveOnly: live})
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(ls)
	ls.Flags().StringVar(&workspace, "workspace", "", "only those of this workspace")
	ls.Flags().BoolVar(&live, "live", false, "only those that have not ended")
	_ = ls.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	return group("instances", "Launched instances of workspaces, and those that no workspace accounts for",
		[]string{"instance"}, ls, endInstanceCommand(p))
}

var claimView = view[*lifecyclev1.Claim]{
	name: (*lifecyclev1.Claim).GetClaimId,
	columns: []column[*lifecyclev1.Claim]{
		{title: "CLAIM", id: true, path: "claim_id"},
		{title: "KIND", path: "kind"},
		{title: "NAME", path: "name"},
		{title: "SCOPE", drop: 3, path: "scope"},
		{title: "STATE", of: func(_ *printer, c *lifecyclev1.Claim) string { return claimState(c) }},
		{title: "WORKSPACE", drop: 2, id: true, path: "workspace|workspace_id"},
		{title: "EPOCH", path: "epoch", wide: true},
		{title: "NODE", path: "node_name|node_id", wide: true},
		{title: "WORKSPACE ID", path: "workspace_id", wide: true},
		{title: "NODE ID", path: "node_id", wide: true},
		{title: "EXTERNAL", path: "external_ref", wide: true},
		{title: "ORPHANED BY", wide: true, path: "orphaned_by orphan_reason", as: joined},
	},
}

// claimState returns the state of a claim in one word.
func claimState(c *lifecyclev1.Claim) string {
	switch {
	case c.GetReleasedAt() != nil:
		return "released"
	case c.GetOrphanedAt() != nil:
		return "orphaned"
	case c.GetConfirmedAt() != nil:
		return "confirmed"
	}
	return "intended"
}

func claimsCommand(p *Program) *cobra.Command {
	var (
		page          paging
		workspace     string
		orphaned, all bool
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the resources that runs made or meant to make",
		Example: "  gpuaas claims list --orphaned", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			id, err := s.workspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return show(ctx, s, page, source[*lifecyclev1.Claim]{
				view: claimView,
				fetch: func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Claim, string, error) {
					answer, err := s.query.ListClaims(ctx, &readmodelv1.ListClaimsRequest{
						PageSize: size, PageToken: token, WorkspaceId: id, OrphanedOnly: orphaned, IncludeReleased: all,
					})
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(ls)
	ls.Flags().StringVar(&workspace, "workspace", "", "only those of this workspace")
	ls.Flags().BoolVar(&orphaned, "orphaned", false, "only those that were given up without being confirmed gone")
	ls.Flags().BoolVar(&all, "all", false, "released ones too")
	_ = ls.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	return group("claims", "Resources that operations made or meant to make", []string{"claim"}, ls)
}
