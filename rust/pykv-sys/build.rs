//! Finds an installed pykv, and declares what its headers declare.
//!
//! PYKV_LIBRARY_DIR says where libkernels.so.0 is, else the Python package on the path does; the headers are in `include`
//! beside that folder, or in PYKV_INCLUDE_DIR.  Crates that depend on this one get the folder as DEP_PYKV_LIBDIR.
use std::path::{Path, PathBuf};
use std::{env, fs, process::Command};

fn library_dir() -> PathBuf {
    if let Ok(folder) = env::var("PYKV_LIBRARY_DIR") {
        return folder.into();
    }
    let ask = ["-c", "import pykv; print(pykv.get_library_dir())"];
    let asked = Command::new("python3").args(ask).output();
    let told = asked.ok().filter(|done| done.status.success());
    let told = told.expect("PYKV_LIBRARY_DIR is not set, and python3 knows no pykv");
    String::from_utf8_lossy(&told.stdout).trim().into()
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap_or("").to_string();
    parts.fold(first, |before, part| before + part.split_once("*/").map_or("", |(_, code)| code))
}

/// `const DLTensor* input` -> ("*const DLTensor", "input"); a type alone has no name.
fn typed(c: &str) -> (String, &str) {
    let end = c.rfind(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').map_or(0, |i| i + 1);
    let (kind, name) = (c[..end].trim(), &c[end..]);
    let pointers = kind.matches('*').count();
    let is_const = kind.starts_with("const ");
    let plain = kind.trim_start_matches("const ").trim_end_matches(['*', ' ']);
    let base = match plain {
        "void" => "c_void",
        "char" => "c_char",
        "double" => "f64",
        "int32_t" => "i32",
        "int64_t" => "i64",
        "bool" | "DLDevice" | "DLTensor" | "pykv_status" | "pykv_tensor_list" => plain,
        options if options.ends_with("_options") => options, // written in lib.rs
        unknown => panic!("{c}: there is no type of Rust for {unknown}"),
    };
    let mut kind = base.to_string();
    for level in 0..pointers {
        kind = format!("*{} {kind}", if is_const && level == 0 { "const" } else { "mut" });
    }
    (kind, name)
}

/// What follows PYKV_API, up to the semicolon, as a function of Rust.
fn declaration(c: &str) -> String {
    let plain = c.split_whitespace().collect::<Vec<_>>().join(" ");
    let (head, rest) = plain.split_once('(').expect("a function");
    let (result, name) = typed(head);
    let parameters: Vec<_> = rest.trim_end_matches(')').split(", ").filter(|p| *p != "void").map(typed).collect();
    let parameters: Vec<_> = parameters.iter().map(|(kind, name)| format!("r#{name}: {kind}")).collect();
    let returned = if result == "c_void" { String::new() } else { format!(" -> {result}") };
    format!("    pub fn {name}({}){returned};\n", parameters.join(", "))
}

fn declarations(headers: &Path) -> String {
    let folder = fs::read_dir(headers).unwrap_or_else(|e| panic!("{}: {e}", headers.display()));
    let mut paths: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "h"));
    paths.sort();
    let mut found = String::new();
    for path in paths {
        println!("cargo:rerun-if-changed={}", path.display());
        let text = without_comments(&fs::read_to_string(&path).unwrap());
        let code: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        for part in code.join("\n").split("PYKV_API ").skip(1) {
            found += &declaration(part.split(';').next().unwrap());
        }
    }
    format!("extern \"C\" {{\n{found}}}\n")
}

fn main() {
    println!("cargo:rerun-if-env-changed=PYKV_LIBRARY_DIR");
    println!("cargo:rerun-if-env-changed=PYKV_INCLUDE_DIR");
    let library = library_dir();
    let include = env::var("PYKV_INCLUDE_DIR").map_or_else(|_| library.join("../include"), PathBuf::from);
    let out = PathBuf::from(env::var("OUT_DIR").unwrap()).join("functions.rs");
    fs::write(out, declarations(&include.join("pykv"))).unwrap();
    println!("cargo:rustc-link-search=native={}", library.display());
    println!("cargo:rustc-link-lib=dylib:+verbatim=libkernels.so.0"); // a wheel has no libkernels.so
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", library.display());
    println!("cargo:libdir={}", library.display());
}
