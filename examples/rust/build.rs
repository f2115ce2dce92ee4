// Links libkernels.so.0 of an installed pykv: PYKV_LIBRARY_DIR, or what the Python package on the path says.
use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=PYKV_LIBRARY_DIR");
    let folder = env::var("PYKV_LIBRARY_DIR").unwrap_or_else(|_| {
        let ask = ["-c", "import pykv; print(pykv.get_library_dir())"];
        let asked = Command::new("python3").args(ask).output();
        let told = asked.ok().filter(|done| done.status.success());
        let told = told.expect("PYKV_LIBRARY_DIR is not set, and python3 knows no pykv");
        String::from_utf8_lossy(&told.stdout).trim().to_string()
    });
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib:+verbatim=libkernels.so.0"); // a wheel has no libkernels.so
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}
