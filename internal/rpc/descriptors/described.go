package descriptors

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Of returns the descriptors of services and of everything that these need. Of a file that declares another
// service, which is not offered here, it contains only the needed types.
func Of(services []string) (*protoregistry.Files, error) {
	d := &description{
		services: services, whole: map[string]bool{}, needed: map[protoreflect.FullName]bool{},
		out: new(protoregistry.Files),
	}
	var roots []protoreflect.FileDescriptor
	for _, name := range services {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			return nil, fmt.Errorf("describe service %s: %w", name, err)
		}
		service, ok := found.(protoreflect.ServiceDescriptor)
		if !ok {
			return nil, fmt.Errorf("describe service %s: it is no service", name)
		}
		roots = append(roots, service.ParentFile())
		d.needService(service)
	}
	for _, file := range roots {
		if err := d.build(file); err != nil {
			return nil, err
		}
	}
	return d.out, nil
}

// description is the state of one call of described.
type description struct {
	services []string
	whole    map[string]bool // files of which everything is needed
	needed   map[protoreflect.FullName]bool
	out      *protoregistry.Files
}

// offers reports whether every service of a file is offered.
func (d *description) offers(file protoreflect.FileDescriptor) bool {
	for i := range file.Services().Len() {
		if !d.offered(file.Services().Get(i).FullName()) {
			return false
		}
	}
	return true
}

func (d *description) offered(service protoreflect.FullName) bool {
	return slices.Contains(d.services, string(service))
}

func (d *description) needService(service protoreflect.ServiceDescriptor) {
	if d.offers(service.ParentFile()) {
		d.needFile(service.ParentFile())
	}
	for i := range service.Methods().Len() {
		d.need(service.Methods().Get(i).Input())
		d.need(service.Methods().Get(i).Output())
	}
	d.needOptions(service.ParentFile())
}

// needFile marks everything in a file whose services are all offered as needed.
func (d *description) needFile(file protoreflect.FileDescriptor) {
	if d.whole[file.Path()] {
		return
	}
	d.whole[file.Path()] = true
	for i := range file.Services().Len() {
		d.needService(file.Services().Get(i))
	}
	for i := range file.Messages().Len() {
		d.needMessage(file.Messages().Get(i))
	}
	for i := range file.Extensions().Len() {
		d.needField(file.Extensions().Get(i))
	}
	for i := range file.Imports().Len() {
		if one := file.Imports().Get(i); d.offers(one) {
			d.needFile(one)
		}
	}
}

// needOptions marks the files that extend options as needed: descriptors of files that import them contain those
// options.
func (d *description) needOptions(file protoreflect.FileDescriptor) {
	for i := range file.Imports().Len() {
		if one := file.Imports().Get(i); one.Extensions().Len() > 0 && d.offers(one) {
			d.needFile(one)
		}
	}
}

// need marks a type, and the declarations that contain it, as needed.
func (d *description) need(of protoreflect.Descriptor) {
	file := of.ParentFile()
	if d.offers(file) {
		d.needFile(file)
		return
	}
	for of.Parent() != protoreflect.Descriptor(file) {
		of = of.Parent()
	}
	if d.needed[of.FullName()] {
		return
	}
	d.needed[of.FullName()] = true
	d.needOptions(file)
	if message, ok := of.(protoreflect.MessageDescriptor); ok {
		d.needMessage(message)
	}
}

func (d *description) needMessage(message protoreflect.MessageDescriptor) {
	for i := range message.Fields().Len() {
		d.needField(message.Fields().Get(i))
	}
	for i := range message.Messages().Len() {
		d.needMessage(message.Messages().Get(i))
	}
}

func (d *description) needField(field protoreflect.FieldDescriptor) {
	if of := field.Message(); of != nil {
		d.need(of)
	}
	if of := field.Enum(); of != nil {
		d.need(of)
	}
}

// build makes the descriptor of a file from the needed parts of it and of its imports.
func (d *description) build(file protoreflect.FileDescriptor) error {
	if _, err := d.out.FindFileByPath(file.Path()); err == nil {
		return nil
	}
	raw := protodesc.ToFileDescriptorProto(file)
	if !d.whole[file.Path()] {
		d.cut(raw, file.Package())
	}
	raw.Dependency, raw.PublicDependency, raw.WeakDependency = nil, nil, nil
	for i := range file.Imports().Len() {
		one := file.Imports().Get(i)
		if !d.whole[one.Path()] && !d.anyNeeded(one) {
			continue
		}
		if err := d.build(one.FileDescriptor); err != nil {
			return err
		}
		if one.IsPublic {
			raw.PublicDependency = append(raw.PublicDependency, int32(len(raw.GetDependency())))
		}
		raw.Dependency = append(raw.Dependency, one.Path())
	}
	out, err := protodesc.NewFile(raw, d.out)
	if err != nil {
		return fmt.Errorf("describe %s: %w", file.Path(), err)
	}
	return d.out.RegisterFile(out)
}

// cut removes everything from a file that is not needed.
func (d *description) cut(raw *descriptorpb.FileDescriptorProto, in protoreflect.FullName) {
	raw.Service = slices.DeleteFunc(raw.GetService(), func(s *descriptorpb.ServiceDescriptorProto) bool {
		return !d.offered(in.Append(protoreflect.Name(s.GetName())))
	})
	raw.MessageType = slices.DeleteFunc(raw.GetMessageType(), func(m *descriptorpb.DescriptorProto) bool {
		return !d.needed[in.Append(protoreflect.Name(m.GetName()))]
	})
	raw.EnumType = slices.DeleteFunc(raw.GetEnumType(), func(e *descriptorpb.EnumDescriptorProto) bool {
		return !d.needed[in.Append(protoreflect.Name(e.GetName()))]
	})
	raw.Extension, raw.SourceCodeInfo = nil, nil
}

// anyNeeded reports whether a file that is not needed whole has a type that is.
func (d *description) anyNeeded(file protoreflect.FileDescriptor) bool {
	for i := range file.Messages().Len() {
		if d.needed[file.Messages().Get(i).FullName()] {
			return true
		}
	}
	for i := range file.Enums().Len() {
		if d.needed[file.Enums().Get(i).FullName()] {
			return true
		}
	}
	return false
}
