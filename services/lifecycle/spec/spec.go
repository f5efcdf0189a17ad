package spec

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/workrules"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Plan bounds what one workspace of the plan may request.
type Plan struct {
	MaxGPUs         int32 `yaml:"max_gpus"`
	MaxStorageBytes int64 `yaml:"max_storage_bytes"`
	MaxWorkloads    int   `yaml:"max_workloads"`
}

// Catalogue is what tenants may choose from.
type Catalogue struct {
	Plans   map[string]Plan
	Regions []string
	Default commonv1.PlacementDriver
	// Placements are those that are configured; empty means that the process that launches decides.
	Placements []commonv1.PlacementDriver
}

const (
	defaultPlan    = "local"
	defaultStorage = 64 << 20
	// demoCommand makes the agent run the workload that is built into it.
	demoCommand = "@demo"
)

// Complete fills in what a spec leaves out, and refuses what the catalogue does not have.
func (c Catalogue) Complete(in *lifecyclev1.WorkspaceSpec) (*lifecyclev1.WorkspaceSpec, error) {
	spec := &lifecyclev1.WorkspaceSpec{}
	if in != nil {
		spec = proto.CloneOf(in)
	}
	spec.Plan = cmp.Or(spec.GetPlan(), defaultPlan)
	if spec.GetRegion() == "" && len(c.Regions) > 0 {
		spec.Region = c.Regions[0]
	}
	spec.Placement = cmp.Or(spec.GetPlacement(), c.Default)
	spec.StorageBytes = cmp.Or(spec.GetStorageBytes(), defaultStorage)
	if len(spec.GetWorkloads()) == 0 {
		spec.Workloads = []*nodev1.Workload{{
			Name: "demo", Command: []string{demoCommand}, Ports: []*nodev1.Port{{Name: "http"}},
			Readiness:     &nodev1.Readiness{HttpPath: "/healthz", Timeout: durationpb.New(2e9)},
			RestartPolicy: nodev1.RestartPolicy_RESTART_POLICY_ALWAYS,
		}}
		// On a machine, the workload's endpoint is built from the machine's address, so the workload must listen there.
		if !placement.HasOwnInstance(spec.GetPlacement()) {
			spec.Workloads[0].Env = map[string]string{"HOST": "0.0.0.0"}
		}
	}
	return spec, c.Check(spec)
}

// Check refuses a spec that this configuration does not offer.
func (c Catalogue) Check(spec *lifecyclev1.WorkspaceSpec) error {
	plan, ok := c.Plans[spec.GetPlan()]
	if !ok {
		return fault.New(commonv1.Reason_REASON_PLAN_UNKNOWN, fmt.Sprintf("there is no plan %q", spec.GetPlan()),
			fault.Remedy(fmt.Sprintf("plans are %v", c.plans())))
	}
	if !slices.Contains(c.Regions, spec.GetRegion()) {
		return fault.New(commonv1.Reason_REASON_REGION_UNAVAILABLE,
			fmt.Sprintf("region %q is not served here", spec.GetRegion()),
			fault.Remedy(fmt.Sprintf("regions are %v", c.Regions)))
	}
	if len(c.Placements) > 0 && !slices.Contains(c.Placements, spec.GetPlacement()) {
		var have []string
		for _, p := range c.Placements {
			have = append(have, names.Of(p))
		}
		slices.Sort(have)
		return fault.New(commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
			fmt.Sprintf("placement %s is not available here", names.Of(spec.GetPlacement())),
			fault.Remedy(fmt.Sprintf("placements are %v", have)))
	}
	var unmet []string
	if spec.GetGpus() > plan.MaxGPUs {
		unmet = append(unmet, fmt.Sprintf("%d GPUs are asked for, and plan %s has at most %d", spec.GetGpus(), spec.GetPlan(),
			plan.MaxGPUs))
	}
	if spec.GetStorageBytes() > plan.MaxStorageBytes {
		unmet = append(unmet, fmt.Sprintf("%d bytes of storage are asked for, and plan %s has at most %d",
			spec.GetStorageBytes(), spec.GetPlan(), plan.MaxStorageBytes))
	}
	if len(spec.GetWorkloads()) > plan.MaxWorkloads {
		unmet = append(unmet, fmt.Sprintf("%d workloads are asked for, and plan %s has at most %d", len(spec.GetWorkloads()),
			spec.GetPlan(), plan.MaxWorkloads))
	}
	if len(unmet) > 0 {
		return fault.New(commonv1.Reason_REASON_QUOTA_EXCEEDED, "the spec asks for more than its plan holds",
			fault.Unmet(unmet...))
	}
	return workloadsValid(spec.GetWorkloads(), spec.GetPlacement())
}

// workloadsValid refuses what no machine of the placement could run, before anything is made for it.
func workloadsValid(list []*nodev1.Workload, placement commonv1.PlacementDriver) error {
	seen := map[string]bool{}
	var unmet []string
	for _, w := range list {
		if seen[w.GetName()] {
			unmet = append(unmet, fmt.Sprintf("more than one workload is called %q", w.GetName()))
		}
		seen[w.GetName()] = true
		if len(w.GetCommand()) == 0 && w.GetImage() == "" {
			unmet = append(unmet, fmt.Sprintf("workload %q has neither an image nor a command", w.GetName()))
		}
	}
	if len(unmet) > 0 {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the workloads are not valid", fault.Unmet(unmet...))
	}
	for _, w := range list {
		if len(w.GetCommand()) == 0 && placement != commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER {
			return fault.New(commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
				fmt.Sprintf("workload %q is an image, and machines of placement %s run processes", w.GetName(),
					names.Of(placement)),
				fault.Remedy("give the workload a command"), fault.Unmet(fmt.Sprintf("workload %q has no command", w.GetName())))
		}
	}
	return nil
}

// CheckShape refuses commands and environments that every agent would refuse. It is called for requests alone: specs
// that were admitted before stay as they are.
func CheckShape(list []*nodev1.Workload) error {
	var wrong []string
	for _, w := range list {
		for _, p := range workrules.Check(w) {
			wrong = append(wrong, fmt.Sprintf("workloads[%s].%s", w.GetName(), p))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	const most = 16
	rest := len(wrong) - 1
	text := wrong[0]
	if rest > 0 {
		text += fmt.Sprintf(" (and %d more)", rest)
	}
	return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, text, fault.Remedy("correct the spec and send it again"),
		fault.Unmet(wrong[:min(len(wrong), most)]...))
}

func (c Catalogue) plans() []string {
	return slices.Sorted(maps.Keys(c.Plans))
}

// Input is the input of a run.
type Input struct {
	Tenant      string          `json:"tenant"`
	Workspace   string          `json:"workspace"`
	Spec        json.RawMessage `json:"spec"`
	Attestation *Attestation    `json:"word,omitempty"` // of a recreation whose former epoch cannot be confirmed ended
}

// NewInput returns the input of a run that makes a workspace of a tenant by its spec.
func NewInput(tenant, workspace string, spec json.RawMessage) Input {
	return Input{Tenant: tenant, Workspace: workspace, Spec: spec}
}

// Read reads a run's input and its spec.
func Read(raw json.RawMessage) (Input, *lifecyclev1.WorkspaceSpec, error) {
	var in Input
	if err := json.Unmarshal(raw, &in); err != nil {
		return in, nil, fmt.Errorf("read input of run: %w", err)
	}
	spec := &lifecyclev1.WorkspaceSpec{}
	if err := names.UnmarshalInto(in.Spec, spec); err != nil {
		return in, nil, fmt.Errorf("read spec of run: %w", err)
	}
	return in, spec, nil
}
