package reconnect

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// enrolled is the fleet, as a file between the processes of the bench.
type enrolled struct {
	TrustDomain string
	Roots       string // the file of those that agents trust
	APIHost     string
	Version     string // of the agents
	TaskKeys    string
	Profile     *commonv1.ProfileFacts
	Nodes       []node
}

// node is one node with its certificate.
type node struct {
	Name, ID, Instance string
	Chain, Key         []byte // PEM
}

// lanes is how many nodes enrol at once. Each lane comes from a loopback address of its own: recovery bounds the
// requests of one address.
const lanes = 16

// enrol makes n agents nodes, the first of them with number from, each with an operator's token and over the listener
// for enrolment.
func (w *world) enrol(ctx context.Context, from, n int) (enrolled, error) {
	list := enrolled{
		TrustDomain: cluster.TrustDomain, Roots: w.cluster.Material.ServiceRoots(), Version: w.opts.Version,
		APIHost: w.cluster.Plan.Addresses.Agents, Nodes: make([]node, n),
	}
	doors, err := w.cluster.Replicas(w.cluster.Plan.Addresses.Enroll)
	if err != nil {
		return list, err
	}
	roots, err := pki.LoadBundle(list.Roots)
	if err != nil {
		return list, err
	}
	answers := make([]*recoveryv1.EnrollResponse, lanes)
	group, ctx := errgroup.WithContext(ctx)
	for lane := range lanes {
		group.Go(func() error {
			door, err := newDoor(doors[lane%len(doors)], net.IPv4(127, 0, 1, byte(lane+1)), roots)
			if err != nil {
				return err
			}
			for i := lane; i < len(list.Nodes); i += lanes {
				list.Nodes[i].Name = fmt.Sprintf("light-%05d", from+i)
				answer, err := w.enrolOne(ctx, door, &list.Nodes[i])
				if err != nil {
					return fmt.Errorf("enrol %s: %w", list.Nodes[i].Name, err)
				}
				answers[lane] = answer
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return list, err
	}
	profile := answers[0].GetProfile()
	list.TaskKeys = answers[0].GetTaskSigningPubkeys()
	list.Profile = &commonv1.ProfileFacts{
		Fingerprint: profile.GetFingerprint(), Name: profile.GetName(), ApiHost: profile.GetApiUrl(),
		RecoveryHost: w.cluster.Plan.Addresses.Enroll, Unit: "gpuaas-node-agent.service",
	}
	return list, nil
}

// newDoor returns a client of one replica's listener for enrolment that comes from an address.
func newDoor(addr string, from net.IP, roots *pki.Bundle) (recoveryv1connect.EnrollmentServiceClient, error) {
	conf, err := pki.ClientTLS(pki.ClientConfig{Roots: roots, Server: pki.ServiceID(cluster.TrustDomain, "recovery")})
	if err != nil {
		return nil, err
	}
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
	return recoveryv1connect.NewEnrollmentServiceClient(&http.Client{
		Transport: &http.Transport{DialContext: dialer.DialContext, TLSClientConfig: conf, ForceAttemptHTTP2: true},
	}, "https://"+addr), nil
}

func (w *world) enrolOne(ctx context.Context, door recoveryv1connect.EnrollmentServiceClient, n *node,
) (*recoveryv1.EnrollResponse, error) {
	issued, err := w.cluster.Client.Command.EnrollNode(ctx, &readmodelv1.EnrollNodeRequest{
		Name: n.Name, IdempotencyKey: n.Name,
	})
	if err != nil {
		return nil, fmt.Errorf("obtain a token: %w", err)
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	csr, err := pki.NewAnonymousCSR(key)
	if err != nil {
		return nil, err
	}
	if n.Key, err = pki.EncodeKey(key); err != nil {
		return nil, err
	}
	const tries = 60
	var answer *recoveryv1.EnrollResponse
	for range tries {
		answer, err = door.Enroll(ctx, &recoveryv1.EnrollRequest{
			Token: issued.GetToken(), Csr: csr, AgentVersion: w.opts.Version, BootId: issued.GetNodeId(),
			Host: host(n.Name, issued.GetNodeId()),
		})
		if connect.CodeOf(err) != connect.CodeResourceExhausted && connect.CodeOf(err) != connect.CodeUnavailable {
			break
		}
		if !app.Sleep(ctx, time.Second) { // the same key gets the same answer
			break
		}
	}
	if err != nil {
		return nil, err
	}
	n.ID, n.Instance, n.Chain = answer.GetNodeId(), answer.GetNodeInstanceId(), answer.GetCertificateChainPem()
	return answer, nil
}

// host returns facts as large as those of a real host with eight devices.
func host(name, id string) *commonv1.HostFacts {
	facts := &commonv1.HostFacts{
		Hostname: name, Kernel: "6.1.0-28-amd64", Os: "linux", Arch: "amd64", Cpus: 64, MemoryBytes: 512 << 30,
		MachineId: id, Addresses: []string{"10.0.0.1", "fd00::1"},
		Disks: []*commonv1.Disk{{Path: "/var/lib/gpuaas", FsType: "ext4", SizeBytes: 1 << 40, FreeBytes: 1 << 39}},
	}
	for i := range int32(8) {
		facts.Gpus = append(facts.Gpus, &commonv1.Gpu{
			DeviceId: fmt.Sprintf("%s-%d", id, i), Index: i, Model: "NVIDIA H100 80GB HBM3", MemoryBytes: 80 << 30,
			DriverVersion: "550.90.07",
		})
	}
	return facts
}
