// The folder of libkernels.so.0, which pykv-sys found: programs look for it there.
fn main() {
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", std::env::var("DEP_PYKV_LIBDIR").unwrap());
}
